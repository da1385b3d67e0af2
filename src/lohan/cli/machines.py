"""`lohan machines`: the machines known by name."""

from lohan.cli.options import JsonOption


def machines(json: JsonOption = False) -> None:
    """List the machines known by name; other ones are described in a .json file."""
    from lohan.cli.output import console, print_json, table
    from lohan.hardware import MACHINE_NAMES, machine_named

    found = [machine_named(name) for name in MACHINE_NAMES]
    if json:
        listed = [
            {
                "name": machine.name,
                "description": machine.description,
                "price_dollars": machine.price_dollars,
            }
            for machine in found
        ]
        print_json({"machines": listed})
        return
    shown = table("Machines", "name", "what is in it", "dollars", numbers=("dollars",))
    for machine in found:
        shown.add_row(machine.name, machine.description, f"{machine.price_dollars:,.0f}")
    console().print(shown)
