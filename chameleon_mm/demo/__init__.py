"""The main job, runnable anywhere: train a small GPT without swapping, with it, and in plain PyTorch, and compare every bit.

command -> text, program, train (twice), compare -> outcome -> show        # model and text are the demo's own
"""
