"""Which columns of a query can be NULL, and what each parameter stands for, from PostgreSQL's parse tree.

Describing a prepared statement gives types, but not nullability. PostgreSQL stores the analysed tree of every
view (`pg_rewrite.ev_action`) and of every SQL-standard function body (`pg_proc.prosqlbody`) as text. So
`fairq gen` makes a temporary function of each query, and this module reads its tree: names are resolved, `*`
is expanded, and each column names its relation.

The inference is sound rather than clever: a column is NOT NULL only if every step from a constraint or a
constant to it is known to preserve that. Everything else is nullable, unless the query file says
`-- fairq: not null <column>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fairq.codegen.model import Name, words

if TYPE_CHECKING:
    from fairq.codegen.catalog import Reader

# -------------------------------------------------------------------------------------------- reading trees


@dataclass(slots=True)
class Node:
    """`{TAG :field value …}`. Values are nodes, lists, text, or None for `<>`."""

    tag: str
    fields: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name)

    def number(self, name: str) -> int:
        return int(self.fields.get(name) or 0)

    def flag(self, name: str) -> bool:
        return self.fields.get(name) == "true"

    def items(self, name: str) -> list[Any]:
        value = self.fields.get(name)
        return value if isinstance(value, list) else []


# ASCII: only ASCII blanks separate tokens, others belong to names.
_TREE_TOKEN = re.compile(r"[(){}]|(?:\\.|[^\s(){}\\])+", re.DOTALL | re.ASCII)


def read_tree(text: str) -> Any:
    """The value of a `pg_node_tree`."""
    tokens = iter(_TREE_TOKEN.findall(text))

    def value(token: str) -> Any:
        if token == "{":
            node = Node(next(tokens))
            name = next(tokens)
            while name != "}":
                node.fields[name[1:]] = value(next(tokens))
                name = next(tokens)
                if name == "[":  # a constant: its length, then its bytes
                    while name != "]":
                        name = next(tokens)
                    name = next(tokens)
            return node
        if token == "(":
            return [value(item) for item in iter(tokens.__next__, ")")]
        if token == "<>":
            return None
        if token.startswith('"') and token.endswith('"') and len(token) > 1:
            token = token[1:-1]
        return re.sub(r"\\(.)", r"\1", token, flags=re.DOTALL)

    return value(next(tokens))


def walk(value: Any, leave_out: str = "") -> Iterator[Node]:
    """`value` and every node below it, without nodes with the tag `leave_out` and those below them."""
    if isinstance(value, Node) and value.tag != leave_out:
        yield value
        value = list(value.fields.values())
    if isinstance(value, list):
        for item in value:
            yield from walk(item, leave_out)


# -------------------------------------------------------------------------------------------------- facts

SELECT, UPDATE, INSERT, DELETE, MERGE = 1, 2, 3, 4, 5  # CmdType
_RELATION, _SUBQUERY, _JOIN, FUNCTION, _VALUES, _CTE, _GROUP = 0, 1, 2, 3, 5, 6, 9  # RTEKind
_LEFT, _FULL, _RIGHT = 1, 2, 3  # JoinType
_EXISTS, _SCALAR, _ARRAY = 0, 4, 6  # SubLinkType
_UNION, _INTERSECT = 1, 2  # SetOperation
_EXPLICIT_OR_IMPLICIT_CAST = ("1", "2")  # CoercionForm


# Built-in functions that never return NULL unless an argument is NULL. Not listed: those that return NULL for
# "no match", "no such key" or "out of range" (substring, ->, nullif, regexp_match, array_length), or for
# infinity (extract, date_part, to_char).
_KEEPS_NOT_NULL = words(
    """abs acos array_append array_cat array_prepend ascii asin atan atan2 bit_count bit_length btrim
    cardinality ceil ceiling char_length character_length chr clock_timestamp concat concat_ws
    convert_from convert_to cos currval date_bin date_trunc decode degrees div encode exp factorial
    floor format gcd gen_random_uuid hashtext initcap isempty isfinite json_array_length
    json_build_array json_build_object json_strip_nulls json_typeof jsonb_array_length
    jsonb_build_array jsonb_build_object jsonb_pretty jsonb_strip_nulls jsonb_typeof justify_days
    justify_hours justify_interval lastval lcm left length ln log lower_inc lower_inf lpad ltrim
    make_date make_interval make_time make_timestamp make_timestamptz md5 mod nextval now
    num_nonnulls num_nulls octet_length overlay pg_backend_pid pg_current_xact_id pg_notify pi
    position power quote_ident quote_literal quote_nullable radians random repeat replace reverse
    right round rpad rtrim set_config setval sha224 sha256 sha384 sha512 sign sin sqrt starts_with
    statement_timestamp string_to_array strpos tan timezone to_hex to_json to_jsonb
    transaction_timestamp translate trunc txid_current upper_inc upper_inf uuidv4 uuidv7"""
)
# For text only: a range without a bound has NULL.
_KEEPS_TEXT_NOT_NULL = words("lower upper")
_OPERATORS = words(
    "= <> != < > <= >= + - * / % ^ || ~ ~* !~ !~* ~~ !~~ ~~* !~~* && @> <@ ? ?| ?& & | << >> -|-"
)
_AGGREGATES_OF_VALUES = words("sum min max avg bool_and bool_or every string_agg bit_and bit_or bit_xor")
_AGGREGATES_OF_ROWS = words("array_agg json_agg jsonb_agg json_object_agg jsonb_object_agg")
_WINDOW_FUNCTIONS = words("row_number rank dense_rank percent_rank cume_dist count")
# Set-returning built-ins whose first column is never NULL, and those whose second column is not either.
_SET_FUNCTIONS = words(
    """generate_series generate_subscripts json_array_elements json_each json_each_text json_object_keys
    jsonb_array_elements jsonb_each jsonb_each_text jsonb_object_keys regexp_split_to_table"""
)
_SET_FUNCTIONS_OF_PAIRS = words("json_each jsonb_each")
_NEVER_NULL = words(
    "ARRAYEXPR ROWEXPR NULLTEST BOOLEANTEST DISTINCTEXPR GROUPINGFUNC NEXTVALUEEXPR MERGESUPPORTFUNC"
)
_JSON_TYPES = frozenset({"114", "3802"})
_TIME_TYPES = frozenset({"1083", "1266"})
_TEXT_TYPES = frozenset({"25"})


@dataclass(frozen=True, slots=True)
class RelationFacts:
    name: Name
    not_null: frozenset[int]  # attribute numbers with a valid NOT NULL constraint
    names: Mapping[int, str]
    dims: Mapping[int, int]  # of arrays, as declared
    view: Node | None = None  # the query of a view


@dataclass(frozen=True, slots=True)
class Scope:
    """A query and its outer queries. `nulled` are the range table entries that may be all NULL."""

    query: Node
    outer: Scope | None
    nulled: frozenset[int]

    def up(self, levels: int) -> Scope:
        return self.outer.up(levels - 1) if levels and self.outer else self

    def entry(self, number: int) -> Node:
        return self.query.items("rtable")[number - 1]  # type: ignore[no-any-return]


def scope_of(query: Node, outer: Scope | None = None) -> Scope:
    every = frozenset(range(1, len(query.items("rtable")) + 1))
    if query.items("groupingSets"):
        # Rows of a coarser grouping have NULL in the columns they omit.
        nulled = every
    elif query.number("commandType") == MERGE:
        # Which side may be missing depends on the WHEN clauses; only the target's row always exists.
        nulled = every - {query.number("resultRelation")}
    else:
        nulled = _nulled(query["jointree"])
    return Scope(query, outer, nulled)


def entry_of(variable: Node, scope: Scope) -> Node | None:
    """The range table entry of a variable, if it belongs to this very query."""
    here = variable.tag == "VAR" and not variable.number("varlevelsup") and variable.number("varno") > 0
    return scope.entry(variable.number("varno")) if here else None


def _nulled(item: Any) -> frozenset[int]:
    """Range table entries below `item` that are on the nullable side of an outer join."""
    if not isinstance(item, Node):
        return frozenset()
    if item.tag == "FROMEXPR":
        return frozenset[int]().union(*(_nulled(child) for child in item.items("fromlist")))
    if item.tag == "JOINEXPR":
        kind = item.number("jointype")
        left, right = item["larg"], item["rarg"]
        return (_entries(left) if kind in (_RIGHT, _FULL) else _nulled(left)) | (
            _entries(right) if kind in (_LEFT, _FULL) else _nulled(right)
        )
    return frozenset()


def _entries(item: Any) -> frozenset[int]:
    return frozenset(node.number("rtindex") for node in walk(item) if node.tag in ("RANGETBLREF", "JOINEXPR"))


def one_row(query: Node) -> bool:
    """Whether a query always returns exactly one row: a SELECT without FROM, or only of aggregates."""
    tree = query["jointree"]
    no_from = not tree.items("fromlist") and tree["quals"] is None
    of_all = query.flag("hasAggs") and not query.items("groupClause")
    clauses = ("setOperations", "havingQual", "limitCount", "limitOffset")
    return (
        (no_from or of_all)
        and query.number("commandType") == SELECT
        and not query.flag("hasTargetSRFs")
        and not query.items("groupingSets")
        and not any(isinstance(query[clause], Node) for clause in clauses)
    )


def output(query: Node) -> list[Node]:
    """The target entries of a query's result, in order."""
    listed = "targetList" if query.number("commandType") == SELECT else "returningList"
    return [entry for entry in query.items(listed) if not entry.flag("resjunk")]


# ------------------------------------------------------------------------------------------------ inference


class Inference:
    """Infers nullability. `nullable_params` are the numbers of parameters that may be NULL."""

    def __init__(self, facts: Reader, nullable_params: frozenset[int] = frozenset()) -> None:
        self._facts = facts
        self._nullable_params = nullable_params
        # Results being computed. A recursive query counts as NOT NULL inside itself, by induction: its rows
        # come from the first term, or through the second term from earlier rows.
        self._open: set[tuple[int, int]] = set()

    def columns(self, query: Node, outer: Scope | None = None) -> list[bool]:
        """For each result column, whether it is never NULL."""
        return [self._column(query, number, outer) for number in range(len(output(query)))]

    def relation_column(self, relation: int, number: int) -> bool:
        """Whether attribute `number` of a table or view is never NULL."""
        known = self._facts.relation(relation)
        if known.view is None:
            return number < 0 or number in known.not_null
        return number > 0 and self._column(known.view, number - 1, None)

    def _column(self, query: Node, number: int, outer: Scope | None) -> bool:
        key = (id(query), number)
        if key in self._open:
            return True
        self._open.add(key)
        try:
            scope = scope_of(query, outer)
            if isinstance(query["setOperations"], Node):
                return self._set_operation(query["setOperations"], number, scope)
            targets = output(query)
            return number < len(targets) and self.expression(targets[number]["expr"], scope)
        finally:
            self._open.discard(key)

    def _set_operation(self, node: Node, number: int, scope: Scope) -> bool:
        if node.tag == "RANGETBLREF":
            return self._column(scope.entry(node.number("rtindex"))["subquery"], number, scope)
        left = self._set_operation(node["larg"], number, scope)
        if node.number("op") == _UNION:
            return left and self._set_operation(node["rarg"], number, scope)
        if node.number("op") == _INTERSECT:
            return left or self._set_operation(node["rarg"], number, scope)
        return left

    def expression(self, node: Any, scope: Scope) -> bool:
        """Whether an expression is never NULL."""
        if not isinstance(node, Node):
            return False

        arguments = (self.expression(item, scope) for item in node.items("args"))
        match node.tag:
            case "VAR":
                return self._variable(node, scope)
            case "CONST":
                return not node.flag("constisnull")
            case "PARAM":
                return node.number("paramid") not in self._nullable_params
            case "RELABELTYPE" | "COERCEVIAIO" | "ARRAYCOERCEEXPR" | "COLLATEEXPR" | "NAMEDARGEXPR":
                return self.expression(node["arg"], scope)
            case "COERCETODOMAIN":
                return self._facts.type(node.number("resulttype")).not_null or self.expression(
                    node["arg"], scope
                )
            case "FUNCEXPR":
                return self._call(node, scope)
            case "OPEXPR":
                return self._facts.operator(node.number("opno")) in _OPERATORS and all(arguments)
            case "BOOLEXPR":
                return all(arguments)
            case "COALESCEEXPR" | "MINMAXEXPR":
                return any(arguments)
            case "CASEEXPR":
                return self.expression(node["defresult"], scope) and all(
                    self.expression(when["result"], scope) for when in node.items("args")
                )
            case "AGGREF":
                return self._aggregate(node, scope)
            case "WINDOWFUNC":
                known = self._facts.function(node.number("winfnoid"))
                return known.schema == "pg_catalog" and known.name in _WINDOW_FUNCTIONS
            case "SUBLINK":
                return self._sublink(node, scope)
            case "SQLVALUEFUNCTION":
                return node.number("op") <= 13  # all but current_schema
            case _:
                return node.tag in _NEVER_NULL

    def _call(self, node: Node, scope: Scope) -> bool:
        known = self._facts.function(node.number("funcid"))
        if self._facts.promises(known):
            return True
        if known.schema != "pg_catalog":
            return False
        given = {type_ for type_ in map(type_of, node.items("args")) if type_}
        if node["funcformat"] in _EXPLICIT_OR_IMPLICIT_CAST:
            # From PostgreSQL 18 on JSON's null cast to a number is NULL, and infinity has no time of day.
            keeps = not given & _JSON_TYPES and node["funcresulttype"] not in _TIME_TYPES
        elif known.name in _KEEPS_TEXT_NOT_NULL:
            keeps = given <= _TEXT_TYPES
        else:
            keeps = known.name in _KEEPS_NOT_NULL
        return keeps and all(self.expression(item, scope) for item in node.items("args"))

    def _aggregate(self, node: Node, scope: Scope) -> bool:
        known = self._facts.function(node.number("aggfnoid"))
        if known.schema != "pg_catalog":
            return False
        if known.name == "count":
            return True
        # Without GROUP BY there may be no rows, and FILTER may leave them out.
        levels = scope.up(node.number("agglevelsup"))
        if not levels.query.items("groupClause") or levels.query.items("groupingSets") or node["aggfilter"]:
            return False
        if known.name in _AGGREGATES_OF_ROWS:
            return True
        return known.name in _AGGREGATES_OF_VALUES and all(
            self.expression(argument["expr"], scope) for argument in node.items("args")
        )

    def _sublink(self, node: Node, scope: Scope) -> bool:
        kind = node.number("subLinkType")
        if kind in (_EXISTS, _ARRAY):
            return True
        query = node["subselect"]
        return kind == _SCALAR and one_row(query) and self._column(query, 0, scope)

    def _variable(self, node: Node, scope: Scope) -> bool:
        scope = scope.up(node.number("varlevelsup"))
        number, attribute = node.number("varno"), node.number("varattno")
        # In `returning old.x, new.x` one of the two rows may not exist.
        if number in scope.nulled or node.number("varreturningtype") or not number:
            return False
        entry = scope.entry(number)
        if attribute == 0:
            return entry.number("rtekind") == _RELATION  # the whole row
        kind = entry.number("rtekind")
        if kind == _RELATION:
            return self.relation_column(entry.number("relid"), attribute)
        if kind == _SUBQUERY:
            return self._column(entry["subquery"], attribute - 1, scope)
        if kind == FUNCTION:
            return self._function_column(entry, attribute)
        if kind == _VALUES:
            return all(self.expression(row[attribute - 1], scope) for row in entry.items("values_lists"))
        if kind == _CTE:
            return self._cte_column(entry, attribute, scope)
        if kind in (_JOIN, _GROUP):
            meant = entry.items("joinaliasvars" if kind == _JOIN else "groupexprs")
            return attribute <= len(meant) and self.expression(meant[attribute - 1], scope)
        return False

    def _cte_column(self, entry: Node, attribute: int, scope: Scope) -> bool:
        scope = scope.up(entry.number("ctelevelsup"))
        query = next(
            each["ctequery"] for each in scope.query.items("cteList") if each["ctename"] == entry["ctename"]
        )
        # SEARCH and CYCLE add columns after the query's own.
        return attribute <= len(output(query)) and self._column(query, attribute - 1, scope)

    def _function_column(self, entry: Node, attribute: int) -> bool:
        before = 0
        for part in entry.items("functions"):
            count = part.number("funccolcount")
            if attribute <= before + count:
                call = part["funcexpr"]
                if not isinstance(call, Node) or call.tag != "FUNCEXPR" or len(entry.items("functions")) > 1:
                    return False
                known = self._facts.function(call.number("funcid"))
                if self._facts.promises(known):
                    return True
                if known.rows_of is not None:
                    return self.relation_column(known.rows_of, attribute - before)
                listed = _SET_FUNCTIONS if attribute == before + 1 else _SET_FUNCTIONS_OF_PAIRS
                return known.schema == "pg_catalog" and attribute <= before + 2 and known.name in listed
            before += count
        return entry.flag("funcordinality")


def type_of(expression: Node) -> str:
    """The type of a value, if its node has one."""
    for name in ("vartype", "consttype", "paramtype", "resulttype", "funcresulttype", "opresulttype"):
        if expression[name] is not None:
            return str(expression[name])
    return ""


# ----------------------------------------------------------------------------------------------- parameters


@dataclass(frozen=True, slots=True)
class Use:
    """A use of a parameter: the column it is stored in or compared with, or the argument it fills."""

    number: int
    name: str = ""
    relation: int = 0
    attribute: int = 0
    stored: bool = False


_WRAPPERS = words("RELABELTYPE COERCEVIAIO ARRAYCOERCEEXPR COERCETODOMAIN COLLATEEXPR NAMEDARGEXPR")


def uses(query: Node, facts: Reader) -> list[Use]:
    """The uses of a query's parameters, in any order."""
    return [use for node in walk(query) if node.tag == "QUERY" for use in _uses_in(node, facts)]


def _uses_in(query: Node, facts: Reader) -> Iterator[Use]:
    scope = scope_of(query)
    target = query.number("resultRelation")
    if query.number("commandType") in (UPDATE, INSERT) and target:
        relation = scope.entry(target).number("relid")
        stored = list(query.items("targetList"))
        if isinstance(query["onConflict"], Node):
            stored += query["onConflict"].items("onConflictSet")
        names = facts.relation(relation).names
        for entry in stored:
            attribute = entry.number("resno")
            for value in _values(entry["expr"], scope):
                if (number := parameter(value, facts)) is not None:
                    yield Use(number, names.get(attribute, ""), relation, attribute, stored=True)
    for name, clause in (("limit", "limitCount"), ("offset", "limitOffset")):
        if (number := parameter(query[clause], facts)) is not None:
            yield Use(number, name)
    for node in walk(list(query.fields.values()), leave_out="QUERY"):
        arguments = node.items("args")
        if node.tag in ("OPEXPR", "SCALARARRAYOPEXPR", "DISTINCTEXPR", "NULLIFEXPR") and len(arguments) == 2:
            for one, other in (arguments, arguments[::-1]):
                number = parameter(one, facts)
                column = _column_of(other, scope)
                if number is not None and column is not None:
                    yield column(number)
        elif node.tag == "FUNCEXPR" and node["funcformat"] not in _EXPLICIT_OR_IMPLICIT_CAST:
            names_of = facts.function(node.number("funcid")).names
            for position, argument in enumerate(arguments):
                if isinstance(argument, Node) and argument.tag == "NAMEDARGEXPR":
                    position = argument.number("argnumber")
                if (number := parameter(argument, facts)) is not None and position < len(names_of):
                    yield Use(number, names_of[position])


def _values(expression: Any, scope: Scope) -> Iterator[Any]:
    """What an insert stores in a column: an expression, one per row of VALUES, or that of its SELECT."""
    entry = entry_of(expression, scope) if isinstance(expression, Node) else None
    if entry is not None:
        attribute = expression.number("varattno")
        if entry.number("rtekind") == _VALUES:
            for row in entry.items("values_lists"):
                yield row[attribute - 1]
            return
        if entry.number("rtekind") == _SUBQUERY and 0 < attribute <= len(output(entry["subquery"])):
            yield output(entry["subquery"])[attribute - 1]["expr"]
            return
    yield expression


def parameter(node: Any, facts: Reader) -> int | None:
    """The parameter's number, if `node` is a parameter inside any casts."""
    while isinstance(node, Node) and node.tag != "PARAM":
        if node.tag in _WRAPPERS:
            node = node["arg"]
            continue
        cast = node.tag == "FUNCEXPR" and node["funcformat"] in _EXPLICIT_OR_IMPLICIT_CAST
        built_in = cast and facts.function(node.number("funcid")).schema == "pg_catalog"
        node = node.items("args")[0] if built_in else None
    return node.number("paramid") if isinstance(node, Node) and node["paramkind"] in (None, "0") else None


def _column_of(node: Any, scope: Scope) -> Callable[[int], Use] | None:
    while isinstance(node, Node) and node.tag in _WRAPPERS:
        node = node["arg"]
    if not isinstance(node, Node) or (entry := entry_of(node, scope)) is None:
        return None
    attribute = node.number("varattno")
    names = entry["eref"].items("colnames") if isinstance(entry["eref"], Node) else []
    if not 0 < attribute <= len(names):
        return None
    name, relation = str(names[attribute - 1]), entry.number("relid")
    if entry.number("rtekind") != _RELATION:
        relation = attribute = 0
    return lambda number: Use(number, name, relation, attribute)
