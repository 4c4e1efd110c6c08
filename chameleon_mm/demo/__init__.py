"""The demo: train a small GPT without swapping, with it, and in plain PyTorch, and compare every bit.

command -> program (text, model, one training), train (its runs, compared) -> table, JSON, exit code
"""
