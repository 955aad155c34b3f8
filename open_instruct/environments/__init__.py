"""What answers a policy's replies: tools, games and environments of users' own."""
