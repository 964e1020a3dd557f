"""Other losses on the data that a run has recorded, without generating again: `python -m grpo.replay outputs/<run>`.

`command.py` reads the command line, `session.py` finds run, checkpoint and steps and loads them, `compare.py` computes,
`show.py` prints. Nothing in a run folder is changed but replay.json.
"""
