"""Networks, oracles and cases that tests of several packages share."""
