"""`distsim topo`: the known clusters, and one cluster as text, JSON, TOML, GraphML, node-link JSON or a
picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from distsim.text.output_files import image_file, output_file, write_json, written

_DESCRIPTION = "List the clusters that come with distsim, or show one: its links, a node, the fabric."
_CLUSTER_HELP = (
    "a preset with a number of nodes (dgx-h100:4), or a variant of its software (polaris:setup5:8), a cluster TOML, "
    "an NCCL topology XML, "
    "a networkx node-link JSON or an ASTRA-sim network YAML"
)


def add_parser(subparsers: Any) -> None:
    """Register `topo list` and `topo show`."""
    parser = subparsers.add_parser("topo", description=_DESCRIPTION)
    actions = parser.add_subparsers(dest="action", required=True, metavar="{list,show}")
    listing = actions.add_parser("list", help="the presets", description="The presets, one a line.")
    listing.add_argument("--json", action="store_true", help="print JSON")
    show = actions.add_parser("show", help="one cluster", description="One cluster: links, a node, the fabric.")
    show.add_argument("cluster", help=_CLUSTER_HELP)
    instead = show.add_mutually_exclusive_group()
    instead.add_argument("--json", action="store_true", help="print its figures as JSON")
    instead.add_argument("--toml", action="store_true", help="print it as a cluster file, every key explained")
    show.add_argument(
        "--graphml", metavar="FILE", type=output_file("--graphml", "cluster.graphml"), help="write its graph as GraphML"
    )
    show.add_argument(
        "--node-link",
        metavar="FILE",
        type=output_file("--node-link", "cluster.json"),
        help="write its graph as networkx node-link JSON",
    )
    show.add_argument("--plot", metavar="FILE", type=image_file, help="draw it (.html, .svg, .png, .pdf; extra: plot)")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Print or compare the clusters that the arguments name, and return the exit code."""
    return _list(args) if args.action == "list" else _show(args)


def _list(args: argparse.Namespace) -> int:
    from distsim.cluster import load_cluster, preset_names

    clusters = [(name, load_cluster(name)) for name in preset_names()]
    if args.json:
        rows = [
            {
                "name": name,
                "nodes": cluster.num_nodes,
                "gpus_per_node": cluster.node.num_gpus,
                "nvlink_bytes_per_s": cluster.node.nvlink_bytes_per_s,
                "nics_per_node": cluster.node.num_nics,
                "nic_bytes_per_s": cluster.node.nic_bytes_per_s,
                "description": cluster.description,
                "source": cluster.source,
            }
            for name, cluster in clusters
        ]
        print(json.dumps({"schema": "distsim.topo_list/1", "clusters": rows}, indent=2))
        return 0
    from distsim.cluster.show import render_list
    from distsim.debug.report.console import Console

    console = Console()
    console.print(render_list(clusters, console.width))
    return 0


def _show(args: argparse.Namespace) -> int:
    from distsim.cluster import load_cluster, preset_names, preset_variants

    cluster = load_cluster(args.cluster)
    for line in cluster.warnings:
        print(f"distsim: {line}", file=sys.stderr)
    if args.graphml:
        from distsim.cluster.files.graph_files import to_graphml

        with written("--graphml", args.graphml):
            to_graphml(cluster, args.graphml)
    if args.node_link:
        from distsim.cluster.files.graph_files import to_node_link

        write_json("--node-link", args.node_link, to_node_link(cluster))
    if args.plot:
        from distsim.cluster.plot import plot
        from distsim.report.image import write_image

        write_image(plot(cluster), args.plot)
    if args.json:
        from distsim.cluster.show import to_json

        print(json.dumps(to_json(cluster), indent=2))
    elif args.toml:
        print(cluster.to_toml(), end="")
    elif not (args.graphml or args.node_link or args.plot):
        from distsim.cluster.show import render_cluster
        from distsim.debug.report.console import Console

        preset = args.cluster.partition(":")[0]
        variants = preset_variants(preset) if preset in preset_names() else {}
        Console().print(render_cluster(cluster, variants))
    return 0
