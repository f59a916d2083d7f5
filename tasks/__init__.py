"""How each stage works: rollout -> reward -> advantage -> update -> eval, a plain function and a thin task each."""
