"""Plans with movable residents on the host: between their uses they occupy no device memory."""
