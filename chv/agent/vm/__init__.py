"""Virtual machines: plan, observe, apply, and the actor step that ties them."""
