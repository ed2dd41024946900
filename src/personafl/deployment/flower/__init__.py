"""The same round on Flower: its apps, and the commands around its processes. The extra `flower` brings it."""
