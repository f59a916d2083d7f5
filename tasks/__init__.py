"""How each stage works: rollout -> reward -> advantage -> update -> eval, each a plain function and a thin Flyte task."""
