"""`lohan models` and `lohan machines`: what is known by name."""

from lohan.cli.reading.options import JsonOption


def models(json: JsonOption = False) -> None:
    """List the models known by name; others are given by their config.json."""
    from lohan.cli.tables.output import console, print_json, table
    from lohan.model.names import known_names, shape_of
    from lohan.units import format_count

    shapes = [(name, shape_of(name)) for name in known_names()]
    if json:
        listed = [
            {"name": name, "num_parameters": shape.num_parameters, "num_blocks": shape.num_blocks}
            for name, shape in shapes
        ]
        print_json({"models": listed})
        return
    shown = table("Models", "name", "parameters", "blocks", numbers=("parameters", "blocks"))
    for name, shape in shapes:
        shown.add_row(name, format_count(shape.num_parameters), str(shape.num_blocks))
    console().print(shown)


def machines(json: JsonOption = False) -> None:
    """List the machines known by name; other ones are described in a .json file."""
    from lohan.cli.tables.output import console, print_json, table
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
