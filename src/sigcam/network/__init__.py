"""Any classifier to a `DualBranch`: find the split, attach a sigmoid head, save and load it."""
