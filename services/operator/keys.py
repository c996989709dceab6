"""`penstock keys`: API keys in a file, which running gateways read again within a second."""

import argparse
import os
import time
from pathlib import Path

from services.requests.store.tenants.api_keys import add_key, read_keys, revoke_key, rotate_key
from shared.process.arguments import positive_number
from shared.process.errors import StartupError
from shared.process.settings import DEFAULT_KEYS_FILE

COLUMNS = "{:<24} {:<17} {:>8} {:>10} {:>11} {:>8}  {:<6} {}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands of `penstock keys`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = actions.add_parser("add", help="make a key for a new tenant; it is shown once")
    add.add_argument("name", help="the tenant's name, in the log and in `keys list`")
    add.add_argument("--rpm", type=positive_number, metavar="N", help="requests a minute")
    add.add_argument(
        "--tpm", type=positive_number, metavar="N", help="tokens a minute, estimated as for --max-tokens-in-flight"
    )
    add.add_argument(
        "--concurrency", type=positive_number, metavar="N", help="requests in the pipeline at once (n = 2 are two)"
    )
    add.add_argument(
        "--models", metavar="A,B", help="the models that the tenant may use, by any of their names (default: all)"
    )
    add.add_argument(
        "--priority", type=int, default=0, metavar="N", help="added to the priority of each request; smaller is sooner"
    )
    add.add_argument(
        "--admin", action="store_true", help="an administrator's key: may read /metrics and see the work of all tenants"
    )
    listing = actions.add_parser("list", help="names, limits and ages; never the keys")
    rotate = actions.add_parser("rotate", help="give a tenant another key; the old one stops working at once")
    rotate.add_argument("name")
    revoke = actions.add_parser("revoke", help="revoke a key; its running requests go on to their end")
    revoke.add_argument("name")
    default = Path(os.environ.get("PENSTOCK_KEYS_FILE") or DEFAULT_KEYS_FILE)
    for each in (add, listing, rotate, revoke):
        each.add_argument(
            "--keys-file",
            type=Path,
            default=default,
            metavar="FILE",
            help="default: PENSTOCK_KEYS_FILE, else %(default)s",
        )


def keys(args: argparse.Namespace) -> None:
    """Run one of them. Raises StartupError."""
    match args.action:
        case "add":
            models = tuple(name for name in args.models.split(",") if name) if args.models is not None else None
            if models == ():
                raise StartupError(
                    "--models names no model, so the key would be good for nothing; without it, all are meant"
                )
            limits = {"requests_per_minute": args.rpm, "tokens_per_minute": args.tpm}
            limits |= {"max_concurrency": args.concurrency, "priority": args.priority}
            print(add_key(args.keys_file, args.name, is_admin=args.admin, models=models, **limits))
        case "rotate":
            print(rotate_key(args.keys_file, args.name))
        case "revoke":
            revoke_key(args.keys_file, args.name)
        case _:
            print(table(args.keys_file))


def table(path: Path) -> str:
    """The keys as text."""
    try:
        found = read_keys(path)
    except FileNotFoundError:
        return f"no keys: there is no {path}"
    lines = [COLUMNS.format("NAME", "MADE", "RPM", "TPM", "CONCURRENCY", "PRIORITY", "ADMIN", "MODELS")]
    for key in found:
        limits = [limit if limit is not None else "-" for limit in key.tenant.limits]
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created_at))
        models = ",".join(key.models) if key.models is not None else "all"
        lines.append(COLUMNS.format(key.name, made, *limits, key.priority, "yes" if key.is_admin else "-", models))
    return "\n".join(lines)
