"""CAM methods: from a forward pass to an `Explanation`."""
