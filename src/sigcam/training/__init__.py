"""Train a sigmoid branch, or a softmax classifier to attach one to."""
