// A stand-in for PyTorch's libc10_hip.so: the current stream of device d is stream 70 + d, 69 on the CPU (-1).

#include <cstdint>

namespace c10::OWNER {

class STREAM {
 public:
  void* stream() const;

 private:
  friend STREAM CURRENT(signed char);
  int64_t words[2];
};

__attribute__((used)) void* STREAM::stream() const {
  return reinterpret_cast<void*>(words[1]);
}

__attribute__((used)) STREAM CURRENT(signed char device) {
  STREAM made;
  made.words[1] = 70 + device;
  return made;
}

}  // namespace c10::OWNER
