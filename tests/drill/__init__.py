"""The fault drill: short runs, each with a fault that a seed draws, and after each the laws and the ending are checked.

    python -m tests.drill --runs 200 --seed 0              in this process, fake servers (about 1 s a run)
    python -m tests.drill --kills 20 --seed 0              SIGKILL of the whole run at random times, then resume
    python -m tests.drill --real 6 --seed 0                run.py with the real vLLM: SIGKILL of engine, server, run

Prints a table of faults, endings and violations; exit status 1 with a violation. `test_drill.py` is the short form.
"""
