"""The main job, runnable anywhere: train a small GPT without swapping and with, and compare every bit.

command -> text, train (twice), compare -> outcome -> show        # model and text are the demo's own
"""
