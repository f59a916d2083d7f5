"""Axis 1, one file a model family. In: prompts, latents. Out: velocities, media. Next: rollout and update."""
