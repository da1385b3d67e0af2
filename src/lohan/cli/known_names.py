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
    numbers = ("parameters", "blocks")
    rows = [(name, format_count(one.num_parameters), str(one.num_blocks)) for name, one in shapes]
    console().print(table("Models", "name", *numbers, numbers=numbers, rows=rows))


def machines(json: JsonOption = False) -> None:
    """List the machines known by name; other ones are described in a .json file."""
    from lohan.cli.tables.output import console, print_json, table
    from lohan.hardware import MACHINE_NAMES, machine_named

    found = [machine_named(name) for name in MACHINE_NAMES]
    if json:
        keys = ("name", "description", "price_dollars")
        print_json({"machines": [{key: getattr(one, key) for key in keys} for one in found]})
        return
    columns = ("name", "what is in it", "dollars")
    rows = [(one.name, one.description, f"{one.price_dollars:,.0f}") for one in found]
    console().print(table("Machines", *columns, numbers=("dollars",), rows=rows))
