"""Axis 3, one file a reward. In: media and prompts. Out: one score a sample. Next: advantage."""
