//! The stub application: answers as it is told, and keeps a ledger of every POST.
//!
//! A request whose client goes away is finished all the same, as most applications do; only
//! [`App::stop`] (the application is killed) cuts it off. What was accepted when nobody was
//! left to hear it is therefore in the ledger.

mod answer;
mod ledger;
mod listen;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Router;
use axum::body::Body;
use axum::extract::{ConnectInfo, Request, State};
use axum::response::Response;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use self::answer::Answer;
pub use self::ledger::{Ledger, Post};

use self::listen::{Connection, Killable};
use crate::net::ReservedPort;

type Plan = Box<dyn FnMut(&Post) -> Option<Answer> + Send>;

struct Shared {
    ledger: Ledger,
    script: Mutex<Script>,
    held: watch::Sender<bool>,
}

struct Script {
    plan: Option<Plan>,
    per_id: HashMap<String, std::collections::VecDeque<Answer>>,
    default: Answer,
}

enum Place {
    Tcp(ReservedPort),
    Unix(PathBuf),
}

/// One life of the application, between a start and a stop.
struct Life {
    kill: CancellationToken,
    tasks: TaskTracker,
}

/// The stub application. Dropped: killed.
pub struct App {
    place: Place,
    shared: Arc<Shared>,
    life: Option<Life>,
}

impl fmt::Debug for App {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("App").field("base", &self.base()).finish_non_exhaustive()
    }
}

impl App {
    /// On a loopback port of its own, answering 200 to everything (HTTP/1.1, and HTTP/2 by
    /// prior knowledge).
    pub async fn start() -> Self {
        let mut app = Self::not_started();
        app.restart().await;
        app
    }

    /// Has its port, and refuses connections until [`App::restart`].
    pub fn not_started() -> Self {
        let port = ReservedPort::new().unwrap_or_else(|error| panic!("no port: {error}"));
        Self::at(Place::Tcp(port))
    }

    /// On a Unix socket.
    pub async fn start_unix(path: impl AsRef<Path>) -> Self {
        let mut app = Self::at(Place::Unix(path.as_ref().to_owned()));
        app.restart().await;
        app
    }

    fn at(place: Place) -> Self {
        let script = Script { plan: None, per_id: HashMap::new(), default: Answer::status(200) };
        let (held, _) = watch::channel(false);
        let shared = Shared { ledger: Ledger::default(), script: Mutex::new(script), held };
        Self { place, shared: Arc::new(shared), life: None }
    }

    /// The callback: `http://127.0.0.1:<port>/` or `unix:<path>:/`, followed by `route` without
    /// its leading slash. Every route is served.
    pub fn url(&self, route: &str) -> String {
        format!("{}{}", self.base(), route.trim_start_matches('/'))
    }

    fn base(&self) -> String {
        match &self.place {
            Place::Tcp(port) => format!("http://{}/", port.addr()),
            Place::Unix(path) => format!("unix:{}:/", path.display()),
        }
    }

    /// Its address.
    ///
    /// # Panics
    /// On a Unix socket.
    pub fn addr(&self) -> SocketAddr {
        match &self.place {
            Place::Tcp(port) => port.addr(),
            Place::Unix(path) => panic!("{} is no TCP address", path.display()),
        }
    }

    /// What it was sent and what it answered; the same over restarts.
    pub fn ledger(&self) -> &Ledger {
        &self.shared.ledger
    }

    /// Answers to come for this id, one per POST; after the last of them the plan and the
    /// default decide again. Added behind what is planned already.
    pub fn plan(&self, id: &str, answers: impl IntoIterator<Item = Answer>) {
        let mut script = lock(&self.shared.script);
        script.per_id.entry(id.to_owned()).or_default().extend(answers);
    }

    /// Asks `plan` about each POST that has no answer of its own; `None` means the default.
    pub fn plan_with(&self, plan: impl FnMut(&Post) -> Option<Answer> + Send + 'static) {
        lock(&self.shared.script).plan = Some(Box::new(plan));
    }

    /// What everything else is answered.
    pub fn set_default(&self, answer: Answer) {
        lock(&self.shared.script).default = answer;
    }

    /// Requests wait, recorded as begun and not answered, until [`App::let_go`].
    pub fn hold(&self) {
        self.shared.held.send_replace(true);
    }

    /// Ends [`App::hold`].
    pub fn let_go(&self) {
        self.shared.held.send_replace(false);
    }

    /// Is killed: connections are reset, requests under way end without an answer, new
    /// connections are refused.
    pub async fn stop(&mut self) {
        if let Some(life) = self.life.take() {
            life.kill.cancel();
            life.tasks.close();
            life.tasks.wait().await;
        }
        if let Place::Unix(path) = &self.place {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Starts again at the same address, killing it first if it runs. The plan and the ledger
    /// stay.
    pub async fn restart(&mut self) {
        self.stop().await;
        let kill = CancellationToken::new();
        let tasks = TaskTracker::new();
        let context =
            Context { shared: Arc::clone(&self.shared), kill: kill.clone(), tasks: tasks.clone() };
        let router = Router::new().fallback(receive).with_state(context);
        let service = router.into_make_service_with_connect_info::<Connection>();
        let listener = self.listener(&kill).unwrap_or_else(|error| {
            panic!("the stub application cannot listen at {}: {error}", self.base())
        });
        let killed = kill.clone();
        tasks.spawn(async move {
            tokio::select! {
                () = killed.cancelled() => {}
                _ = axum::serve(listener, service) => {}
            }
        });
        self.life = Some(Life { kill, tasks });
    }

    fn listener(&self, kill: &CancellationToken) -> io::Result<Killable> {
        match &self.place {
            Place::Tcp(port) => Ok(Killable::tcp(port.listen()?, kill.clone())),
            Place::Unix(path) => {
                Ok(Killable::unix(tokio::net::UnixListener::bind(path)?, kill.clone()))
            }
        }
    }
}

impl Drop for App {
    fn drop(&mut self) {
        if let Some(life) = &self.life {
            life.kill.cancel();
        }
        if let Place::Unix(path) = &self.place {
            let _ = std::fs::remove_file(path);
        }
    }
}

#[derive(Clone)]
struct Context {
    shared: Arc<Shared>,
    kill: CancellationToken,
    tasks: TaskTracker,
}

async fn receive(
    State(context): State<Context>,
    ConnectInfo(connection): ConnectInfo<Connection>,
    request: Request,
) -> Response {
    let killed = context.kill.clone();
    let shared = Arc::clone(&context.shared);
    let work = context.tasks.spawn(async move {
        tokio::select! {
            () = killed.cancelled() => None,
            answer = serve(&shared, request) => Some(answer),
        }
    });
    match work.await {
        Ok(Some(answer)) if !answer.is_lost() => answer.into_response(),
        _ => {
            // No answer is to come: the connection ends before one could be written.
            connection.reset();
            std::future::pending().await
        }
    }
}

async fn serve(shared: &Shared, request: Request) -> Answer {
    let (parts, body) = request.into_parts();
    let entry = shared.ledger.begin(&parts);
    let Ok(body) = axum::body::to_bytes(Body::new(body), usize::MAX).await else {
        // The client went away in mid-body: no application accepts half a request.
        return Answer::lost(400);
    };
    let post = shared.ledger.received(entry, &body);
    let answer = next_answer(&shared.script, &post);
    let mut held = shared.held.subscribe();
    // The sender lives as long as `shared`, so that waiting cannot fail.
    let _ = held.wait_for(|held| !held).await;
    tokio::time::sleep(answer.delay()).await;
    shared.ledger.answered(entry, answer.code());
    answer
}

fn next_answer(script: &Mutex<Script>, post: &Post) -> Answer {
    let mut script = lock(script);
    if let Some(answer) = script.per_id.get_mut(&post.id).and_then(|queue| queue.pop_front()) {
        return answer;
    }
    let planned = script.plan.as_mut().and_then(|plan| plan(post));
    planned.unwrap_or_else(|| script.default.clone())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;
    use crate::{ensure, eventually};

    const DEADLINE: Duration = Duration::from_secs(20);

    async fn send(app: &App, id: &str) -> TcpStream {
        let mut stream = TcpStream::connect(app.addr()).await.unwrap();
        let head = format!(
            "POST /x HTTP/1.1\r\nhost: a\r\nconnection: close\r\ninbox-message-id: {id}\r\n\
             inbox-attempt: 1\r\ncontent-length: 2\r\n\r\nhi"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream
    }

    async fn answer(mut stream: TcpStream) -> io::Result<String> {
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        Ok(text.lines().next().unwrap_or_default().to_owned())
    }

    #[tokio::test]
    async fn it_answers_by_plan_and_keeps_a_ledger() {
        let app = App::start().await;
        app.plan("m%1", [Answer::status(503).header("retry-after", "1"), Answer::status(204)]);
        let mut seen = Vec::new();
        for _ in 0..3 {
            seen.push(answer(send(&app, "m%251").await).await.unwrap());
        }
        assert_eq!(
            seen,
            ["HTTP/1.1 503 Service Unavailable", "HTTP/1.1 204 No Content", "HTTP/1.1 200 OK"]
        );
        let ledger = app.ledger();
        assert_eq!(ledger.posts("m%1").len(), 3);
        assert_eq!(ledger.accepted("m%1"), 2);
        assert_eq!(ledger.accepted_more_than_once().into_iter().next(), Some(("m%1".into(), 2)));
        let post = &ledger.all()[0];
        assert_eq!((post.body_len, post.path.as_str(), post.attempt), (2, "/x", 1));
    }

    #[tokio::test]
    async fn a_lost_answer_is_recorded_and_never_sent() {
        let app = App::start().await;
        app.plan("a", [Answer::lost(200)]);
        let heard = answer(send(&app, "a").await).await;
        assert!(!matches!(heard, Ok(text) if !text.is_empty()));
        assert_eq!(app.ledger().accepted("a"), 1);
    }

    #[tokio::test]
    async fn a_killed_one_leaves_its_requests_open_and_refuses_until_it_is_back() {
        let mut app = App::start().await;
        app.hold();
        let stream = send(&app, "a").await;
        let ledger = app.ledger().clone();
        eventually(DEADLINE, async || ensure(ledger.begun() == 1, ledger.begun())).await;
        app.stop().await;
        assert!(!matches!(answer(stream).await, Ok(text) if !text.is_empty()));
        assert_eq!(ledger.open().len(), 1);
        let refused = TcpStream::connect(app.addr()).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        app.restart().await;
        app.let_go();
        assert_eq!(answer(send(&app, "a").await).await.unwrap(), "HTTP/1.1 200 OK");
    }
}
