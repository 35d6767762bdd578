"""A network with its branch, as one file that needs neither sigcam nor PyTorch."""
