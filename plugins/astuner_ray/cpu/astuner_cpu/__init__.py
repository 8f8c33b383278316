"""What stands in for a GPU where VERL or Trinity run without one: parts that their CPU packages share."""
