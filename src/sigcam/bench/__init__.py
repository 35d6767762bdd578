"""The paper's tables and figures, made anew: `paper` is what was published, `run` makes ours."""
