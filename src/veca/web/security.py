"""Who may ask: checked before anything else looks at a request, and the headers every answer gets."""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import parse_qs, urlsplit

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

COOKIE = "veca-token"
HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server there.

    >>> is_loopback("localhost"), is_loopback("127.0.0.3"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def address_of(host: str) -> str:
    """What counts as one address: an IPv6 client usually has a whole /64 network to itself.

    >>> address_of("192.0.2.7"), address_of("::ffff:192.0.2.7"), address_of("2001:db8:1:2:3::4")
    ('192.0.2.7', '192.0.2.7', '2001:db8:1:2::')
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(address) >> 64 << 64))


def names_of(host: str) -> set[str]:
    """Names under which a server bound to `host` may be asked; an empty one stands for all addresses in numbers."""
    names = {*LOOPBACK, host.strip("[]").lower()}
    if host.strip("[]") in ("0.0.0.0", "::", ""):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower(), ""}
    return names


class Guard:
    """ASGI middleware. Refuses other Host names, other sites' requests, requests without the token, and a crowd.

    At most `most` requests are worked on at once, three quarters of them of one address. A request whose body is still
    on its way does not count: uploads have limits of their own.
    """

    def __init__(self, app: App, hosts: Iterable[str], token: str | None = None, most: int = 128) -> None:
        self.app, self.hosts, self.token = app, frozenset(hosts), token
        self.most, self.most_of_one = most, most - most // 4
        self.active: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

        async def send_safe(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                mine = {name for name, _ in message.get("headers", ())}
                extra = [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in mine]
                message = {**message, "headers": [*message.get("headers", ()), *extra]}
            await send(message)

        client = address_of((scope.get("client") or [""])[0])
        refusal = self._refusal(scope, headers, client)
        if refusal is not None:
            await _answer(send_safe, *refusal)
            return
        receiving = True

        async def receive_uncounted() -> MutableMapping[str, Any]:
            nonlocal receiving
            if not receiving:
                return await receive()
            self._count(client, -1)
            try:
                message = await receive()
            finally:
                self._count(client, 1)
            receiving = bool(message.get("more_body"))
            return message

        self._count(client, 1)
        try:
            await self.app(scope, receive_uncounted, send_safe)
        finally:
            self._count(client, -1)

    def _count(self, client: str, change: int) -> None:
        self.active[client] += change
        if not self.active[client]:
            del self.active[client]

    def _refusal(self, scope: Scope, headers: dict[str, str], client: str) -> tuple[int, str, dict[str, str]] | None:
        host = headers.get("host", "")
        if not self._knows(host):
            return 421, "This server does not answer under that name; ask it by the address it printed.", {}
        # A page of another site could send pictures here without being able to read what comes back.
        foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        origin = headers.get("origin")
        if (foreign and scope["path"] != "/") or (origin is not None and urlsplit_netloc(origin) != host.lower()):
            return 403, "Requests of other sites are refused.", {}
        if self.token is not None:
            if scope["path"] == "/":
                given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
                if given and self._is_token(given):
                    cookie = f"{COOKIE}={self.token}; Path=/; HttpOnly; SameSite=Lax"
                    return 303, "", {"location": "/", "set-cookie": cookie}
            if not self._is_token(_presented(headers)):
                return (
                    401,
                    "A token is needed: open the address the server printed, with its ?token=…",
                    {"www-authenticate": "Bearer"},
                )
        if self.active.total() >= self.most or self.active[client] >= self.most_of_one:
            return 503, "Too many requests at once; try again in a moment.", {"retry-after": "1"}
        return None

    def _knows(self, host: str) -> bool:
        name = _name(host)
        if name in self.hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return "" in self.hosts

    def _is_token(self, given: str) -> bool:
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())


def _name(host: str) -> str:
    """The name in a Host header, without its port; nothing where it is none."""
    try:
        return urlsplit(f"//{host}").hostname or "?"
    except ValueError:
        return "?"


def urlsplit_netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return "?"


def _presented(headers: dict[str, str]) -> str:
    kind, _, given = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return given.strip()
    # Not `http.cookies`: before Python 3.11.10 it takes quadratic time to unquote a value.
    cookies = (cookie.strip().partition("=") for cookie in headers.get("cookie", "").split(";"))
    return next((value for name, _, value in cookies if name == COOKIE), "")


async def _answer(send: Send, status: int, problem: str, headers: dict[str, str]) -> None:
    body = json.dumps({"problem": problem}).encode() if problem else b""
    told = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close", **headers}
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(name.encode(), value.encode()) for name, value in told.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})
