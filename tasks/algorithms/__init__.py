"""Axis 2, one file an algorithm: its advantage and its loss. In: rewards, trajectories. Out: losses. Next: update."""
