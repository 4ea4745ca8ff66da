"""tests/scripts.py: scripts in processes of their own."""

import os

import pytest
import scripts


def test_scripts_do_not_know_of_each_other():
    assert scripts.run("import os, math; math.own = 1; print(os.environ['OWN'])", OWN="x") == "x\n"
    assert scripts.run("import os, math; print(hasattr(math, 'own'), os.environ.get('OWN'))") == "False None\n"
    assert "OWN" not in os.environ


def test_failures_are_told():
    with pytest.raises(AssertionError, match="wrong word"):
        scripts.run("raise ValueError('wrong word')")
    with pytest.raises(AssertionError):
        scripts.run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(AssertionError):
        scripts.run("import sys; sys.exit(3)")


def test_output_is_not_mixed_with_errors():
    assert scripts.run("import sys; print('a' * 100_000, file=sys.stderr); print('b')") == "b\n"
