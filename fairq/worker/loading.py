"""From `module:app` on the command line to the App."""

from __future__ import annotations

import importlib
import os
import sys

from fairq.app import App
from fairq.errors import ConfigurationError


def load_app(name: str) -> App:
    """The app named `module:attribute`, or the only one in `module`. Also looks in the current folder."""
    module_name, _, attribute = name.partition(":")
    if not module_name:
        raise ConfigurationError(f"{name!r} names no app", "Name a module and the app in it: myapp.tasks:app")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    if "/" in module_name or (module_name.endswith(".py") and os.path.isfile(module_name)):
        dotted = os.path.normpath(module_name).removesuffix(".py").replace("/", ".")
        known = all(map(str.isidentifier, dotted.split(".")))
        hint = f"Write {dotted}" if known else "Write myapp.tasks for myapp/tasks.py"
        raise ConfigurationError(f"{module_name!r} is a file; a module has dots and no ending", hint)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{module_name}.".startswith(f"{exc.name}."):
            raise ConfigurationError(f"{module_name!r} cannot be imported: {exc}") from exc
        raise ConfigurationError(
            f"there is no module {module_name!r}", f"Looked in {here} and on Python's path."
        ) from exc
    except (Exception, SystemExit) as exc:
        raise ConfigurationError(
            f"{module_name!r} cannot be imported: {type(exc).__name__}: {exc}",
            f'To see where: python -c "import {module_name}"',
        ) from exc
    if attribute:
        found = module
        for part in attribute.split("."):
            found = getattr(found, part, None)  # type: ignore[assignment]
        if found is None:
            raise ConfigurationError(f"there is no {attribute!r} in module {module_name!r}", _known(module))
        if not isinstance(found, App):
            text = f"{name!r} is a {type(found).__name__}, not a fairq.App"
            raise ConfigurationError(text, _known(module))
        return found
    apps = {id(value): value for value in vars(module).values() if isinstance(value, App)}
    if len(apps) != 1:
        raise ConfigurationError(
            f"{module_name!r} has {len(apps) or 'no'} apps; name the one to run", _known(module)
        )
    return next(iter(apps.values()))


def _known(module: object) -> str:
    name = getattr(module, "__name__", "module")
    apps = [f"{name}:{each}" for each, value in vars(module).items() if isinstance(value, App)]
    return f"Apps in it: {', '.join(apps)}" if apps else "Create one: app = fairq.App()"
