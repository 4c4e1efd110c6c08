"""The main job, runnable anywhere: train a small GPT without swapping and with, and compare every bit.

command -> text, train (twice), compare, notes -> outcome -> show        # model, text and schedule are the demo's own
"""
