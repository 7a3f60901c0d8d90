"""All that a real federation needs. Nothing outside imports it: `fedshift.deploy_door` finds it."""
