"""What every process of the service does when it starts."""
