from tritonite.cli import main

main()
