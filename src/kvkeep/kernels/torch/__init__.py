"""Every kernel in plain torch: the specification that faster versions must equal."""
