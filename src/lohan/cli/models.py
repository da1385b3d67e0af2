"""`lohan models`: the models known by name."""

from lohan.cli.options import JsonOption


def models(json: JsonOption = False) -> None:
    """List the models known by name; others are given by their config.json."""
    from lohan.cli.output import console, print_json, table
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
