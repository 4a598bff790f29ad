"""What answers the policy between its turns: tools and environments, in confined processes."""
