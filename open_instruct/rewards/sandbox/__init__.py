"""Programs that the policy writes, run behind walls: code that is judged, and code as a tool."""
