"""Scripts in processes of their own, forked from one that has imported tritonite and has done nothing else.

An import of torch and tritonite takes longer than most scripts do. A process with a GPU does not survive a fork, so
there each script is a process that begins anew.
"""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

FOLDER = Path(__file__).parent
# Seconds after which a forked script is ended.
LIMIT = 240


def run(script, interpreted=True, anew=False, **variables):
    """Run a script with environment variables, and return what it prints. Fails if the script raises.

    Variables are those that tritonite reads when it serves a call, not when it is imported. A process that begins
    `anew` has all of them. The script can import the modules of the tests. If it is not `interpreted`, it can compile
    kernels, and has no GPU.
    """
    import tritonite

    if (tritonite.device == "cpu" or not interpreted) and not anew:
        server = _server(interpreted)
        server.stdin.write(json.dumps([script, variables]) + "\n")
        server.stdin.flush()
        status, output = json.loads(server.stdout.readline())
    else:
        command = [sys.executable, "-c", script]
        environment = _environment(interpreted) | variables
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        status, output = done.returncode, done.stdout if done.returncode == 0 else done.stderr
    assert status == 0, output
    return output


_RANKS = """
import multiprocessing, time, {module}

if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    started = [context.Process(target={module}.main, args=(rank, {count}, {file!r})) for rank in range({count})]
    for process in started:
        process.start()
    # One that has failed leaves the other waiting for it.
    while any(process.is_alive() for process in started) and not any(process.exitcode for process in started):
        time.sleep(0.05)
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
        process.join()
    assert codes == [0] * {count}, codes
"""


def run_ranks(module, count, file):
    """Call main(rank, count, file) of a module of the tests in `count` processes of a group. Fails if one fails."""
    import tritonite

    method = "fork" if tritonite.device == "cpu" else "spawn"
    run(_RANKS.format(module=module, method=method, count=count, file=str(file)))


def _environment(interpreted):
    own = {"PYTHONPATH": os.pathsep.join((str(FOLDER.parent), str(FOLDER), *sys.path))}
    return os.environ | own | ({} if interpreted else {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""})


@functools.cache
def _server(interpreted):
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__))],
        env=_environment(interpreted),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    # The server ends with its input.
    atexit.register(server.communicate)
    return server


def _serve():
    """Fork a process for each line of the input, and write its status and its output as a line."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        script, variables = json.loads(line)
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            child = os.fork()
            if not child:
                _run(script, variables, output, errors)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            told = output if status == 0 else errors
            told.seek(0)
            print(json.dumps([status, told.read()]), file=answers, flush=True)


def _run(script, variables, output, errors):
    """Run a script in a forked process, with files for its output and its errors, and end the process."""
    status = 1
    signal.alarm(LIMIT)
    os.dup2(output.fileno(), 1), os.dup2(errors.fileno(), 2)
    os.environ.update(variables)
    try:
        exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except BaseException:  # noqa: BLE001 - whatever the script raises, the process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    import tritonite  # noqa: F401 - children have it

    _serve()
