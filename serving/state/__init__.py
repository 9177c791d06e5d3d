"""Where cached state goes when it leaves the device. `store` is the seam that other stores plug into."""
