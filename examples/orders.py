"""A service behind inboxd: one route, nothing but Python's standard library."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Orders(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        print(self.headers["Inbox-Message-Id"], body.decode(), flush=True)
        self.send_response(204)  # 2xx: handled; it will not come again
        self.end_headers()


ThreadingHTTPServer(("127.0.0.1", 8080), Orders).serve_forever()
