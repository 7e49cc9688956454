"""Security of requests: host name, origin, token and number at once; headers of responses."""

import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Collection, Iterable
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from veca.errors import ArgumentError

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
    """Whether only this machine can reach a server bound to `host`.

    >>> is_loopback("localhost"), is_loopback("127.0.0.3"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def address_of(host: str) -> str:
    """The address that limits apply to: for IPv6 the /64 network, which usually belongs to one client.

    >>> address_of("192.0.2.7"), address_of("::ffff:192.0.2.7"), address_of("2001:db8:1:2:3::4")
    ('192.0.2.7', '192.0.2.7', '2001:db8:1:2::')
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.IPv6Address(int(address) >> 64 << 64))


def names_of(host: str) -> set[str]:
    """Host names that a server bound to `host` answers to; an empty one stands for every numeric address."""
    names = {*LOOPBACK, host.strip("[]").lower()}
    if host.strip("[]") in ("0.0.0.0", "::", ""):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower(), ""}
    return names


def choose_token(token: str | None, host: str) -> str | None:
    """The token given, or a random one where other machines can reach a server bound to `host`."""
    if token is not None and not re.fullmatch("[A-Za-z0-9_-]{8,}", token):
        raise ArgumentError("--token: at least 8 letters, digits, - or _, so that it fits into an address")
    return secrets.token_urlsafe(16) if token is None and not is_loopback(host) else token


class SecurityMiddleware:
    """ASGI middleware that refuses foreign Host names and origins, missing tokens, and too many requests at once.

    At most `max_requests` are worked on at once, three quarters of them from one address. A request whose body is
    still arriving does not count: uploads have their own limits. Paths in `public` need neither token nor room.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Iterable[str],
        token: str | None = None,
        max_requests: int = 128,
        public: Collection[str] = (),
    ) -> None:
        self.app, self.hosts, self.token, self.public = app, frozenset(hosts), token, frozenset(public)
        self.max_requests, self.max_per_address = max_requests, max_requests - max_requests // 4
        self.active: dict[object, str] = {}  # the address of each request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":  # anything else is a WebSocket, which is ignored
                await self.app(scope, receive, send)
            return
        client = address_of((scope.get("client") or [""])[0])

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if refusal := self._check(scope, client):
            await refusal(scope, receive, send_with_headers)
            return
        request, receiving = object(), True

        async def receive_uncounted() -> Message:
            nonlocal receiving
            if not receiving:
                return await receive()
            del self.active[request]
            try:
                message = await receive()
            finally:
                self.active[request] = client
            receiving = bool(message.get("more_body"))
            return message

        self.active[request] = client
        try:
            await self.app(scope, receive_uncounted, send_with_headers)
        finally:
            del self.active[request]

    def _check(self, scope: Scope, client: str) -> Response | None:
        """The answer to a request that is refused; None if it may pass."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_own_host(host):
            return _refuse(421, "This server does not answer under that name; ask it by the address it printed.")
        # Another site's page could send images here, though it could not read the response.
        foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and scope["path"] != "/"
        if foreign or (origin is not None and origin.lower().partition("://")[2] != host.lower()):
            return _refuse(403, "Requests of other sites are refused.")
        if scope["path"] in self.public:
            return None
        if self.token is not None:
            query = parse_qs(scope["query_string"].decode("latin-1")) if scope["path"] == "/" else {}
            if self._is_token(query.get("token", [""])[0]):
                cookie = f"{COOKIE}={self.token}; Path=/; HttpOnly; SameSite=Lax"
                return RedirectResponse("/", 303, {"connection": "close", "set-cookie": cookie})
            if not self._is_token(_presented_token(headers)):
                message = "A token is needed: open the address the server printed, with its ?token=…"
                return _refuse(401, message, ("www-authenticate", "Bearer"))
        if len(self.active) >= self.max_requests or list(self.active.values()).count(client) >= self.max_per_address:
            return _refuse(503, "Too many requests at once; try again in a moment.", ("retry-after", "1"))
        return None

    def _is_own_host(self, host: str) -> bool:
        # Checked against DNS rebinding: a foreign name that resolves to this server is refused.
        try:
            name = urlsplit(f"//{host}").hostname or "?"
            if name in self.hosts:
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return "" in self.hosts

    def _is_token(self, given: str) -> bool:
        # In constant time, so that response times do not reveal the token.
        return self.token is not None and hmac.compare_digest(given.encode(), self.token.encode())


def _refuse(status: int, problem: str, *headers: tuple[str, str]) -> Response:
    return JSONResponse({"problem": problem}, status, dict([("connection", "close"), *headers]))


def _presented_token(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    # Not `http.cookies`: before Python 3.11.10 it takes quadratic time to unquote a value.
    cookies = (cookie.strip().partition("=") for cookie in headers.get("cookie", "").split(";"))
    return next((value for name, _, value in cookies if name == COOKIE), "")
