//! Figures by HTTP: `GET /metrics`, for Prometheus to scrape.
//!
//! ```text
//!   the command's thread: accepts, reads requests and writes answers, for a bounded number of connections and a bounded time each,
//!     |                   until Ctrl-C or SIGTERM
//!     +--asks--> the one that looks: one look at a time, and at most one each second
//! ```
//!
//! Any user of the machine may connect. So a connection that asks nothing loses its place to a new one, as with the agents.
//! Any page in a browser may lead its own name here. So a request that calls us by a name that is not ours is refused.
//!
//! A look that takes too long is answered with 503 by the scraper's own deadline; it goes on, and the next scrape has it or a newer
//! one. A connection has one request: who scrapes each few seconds needs no more.

use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs as _};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use hyper::body::Incoming;
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE, HOST, HeaderValue};
use hyper::http::uri::Authority;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use nix::sys::socket::{Backlog, listen};
use tenants::coordinator::Interrupt;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::{self, JoinHandle};
use tokio::time::{sleep, timeout};

use crate::failure::{EXIT_UNCHANGED, Failure};
use crate::output;

/// The address to listen on when nothing else is said: on this machine alone.
pub(crate) const ADDRESS: &str = "127.0.0.1:9400";
/// Connections at a time. A new one takes the place of the one that has been idle longest; if none is, it waits.
const CONNECTIONS_MAX: usize = 128;
/// The time that a connection may be idle before its place goes to another: time to ask, and to take the answer.
const IDLE_MIN: Duration = Duration::from_millis(500);
/// The most that is read of a request.
const REQUEST_BYTES_MAX: usize = 64 << 10;
/// The least from one look to the next. Who asks sooner gets what the last has found.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The longest time of a look where the scraper does not say: Prometheus waits 10 s by default.
const LOOK_TIMEOUT: Duration = Duration::from_secs(9);
/// The most, whatever the scraper says.
const LOOK_TIMEOUT_MAX: Duration = Duration::from_secs(50);
/// The part of a scraper's own deadline that a look may take.
const SHARE: f64 = 0.9;
const TIMEOUT_HEADER: &str = "X-Prometheus-Scrape-Timeout-Seconds";
/// From the first byte to the last.
const CONNECTION_TIMEOUT: Duration = Duration::from_mins(1);
/// After a connection that could not be accepted, for want of descriptors say.
const BACK_OFF: Duration = Duration::from_secs(1);

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; version=0.0.4; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// The outcome of one look: figures, or why there are none.
type Look = Result<String, String>;

/// The source of figures: a channel to the thread that looks.
#[derive(Clone)]
struct Source(Sender<oneshot::Sender<Look>>);

impl Source {
    /// Has a thread of its own look whenever somebody asks.
    fn new(look: impl FnMut() -> Look + Send + 'static) -> io::Result<Self> {
        let (ask, asked) = mpsc::channel();
        thread::Builder::new().spawn(move || look_for(&asked, look))?;
        Ok(Self(ask))
    }

    async fn get(&self, limit: Duration) -> Look {
        let (say, said) = oneshot::channel();
        let gone = || "the thread that looks has ended: start the command again".to_owned();
        self.0.send(say).map_err(|_| gone())?;
        match timeout(limit, said).await {
            Ok(Ok(look)) => look,
            Ok(Err(_)) => Err(gone()),
            Err(_) => Err(format!(
                "no answer within {} ms: a process may stand still, which `sublet ps` names",
                limit.as_millis()
            )),
        }
    }
}

fn look_for(asked: &Receiver<oneshot::Sender<Look>>, mut look: impl FnMut() -> Look) {
    let mut last: Option<(Look, Instant)> = None;
    while let Ok(asker) = asked.recv() {
        let fresh = last.take().filter(|(_, at)| at.elapsed() < LOOK_EVERY);
        let (found, _) = last.insert(fresh.unwrap_or_else(|| (look(), Instant::now())));
        // A client that has waited too long is not there.
        asker.send(found.clone()).ok();
    }
}

/// Serves what `look` finds until `interrupt` is raised. `say` is told where, once it listens.
pub(super) fn serve(
    address: SocketAddr,
    look: impl FnMut() -> Look + Send + 'static,
    interrupt: Interrupt,
    say: impl FnOnce(SocketAddr) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let failed = |error: io::Error| {
        let message = format!(
            "{address} cannot be listened on: {error}; name another address, such as --listen 127.0.0.1:9401"
        );
        Failure::new(message, EXIT_UNCHANGED)
    };
    let listener = TcpListener::bind(address).map_err(failed)?;
    // As many may wait as the system allows.
    listen(&listener, Backlog::MAXCONN).map_err(|errno| failed(errno.into()))?;
    listener.set_nonblocking(true).map_err(failed)?;
    let source = Source::new(look).map_err(failed)?;
    let (end, ended) = oneshot::channel();
    watch(interrupt, end).map_err(failed)?;
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_io().enable_time().build().map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    runtime.block_on(async move {
        let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
        say(bound)?;
        tokio::spawn(accept_all(listener, source));
        ended.await.ok();
        Ok(())
    })
}

fn watch(interrupt: Interrupt, end: oneshot::Sender<()>) -> io::Result<()> {
    let wait = move || {
        while !interrupt.is_raised() {
            interrupt.wait(Duration::from_hours(1));
        }
        end.send(()).ok();
    };
    thread::Builder::new().spawn(wait).map(drop)
}

/// Since when nobody has owed a connection an answer; none while somebody does.
type IdleSince = Arc<Mutex<Option<Instant>>>;

fn set_idle(place: &IdleSince, since: Option<Instant>) {
    *place.lock().unwrap_or_else(PoisonError::into_inner) = since;
}

/// Connections that are served.
#[derive(Default)]
struct Places(Vec<(JoinHandle<()>, IdleSince)>);

impl Places {
    /// Waits until there is room for one more, and makes it.
    async fn make_room(&mut self) {
        loop {
            // What has arrived meanwhile is read first.
            task::yield_now().await;
            self.0.retain(|(task, _)| !task.is_finished());
            if self.0.len() < CONNECTIONS_MAX || self.end_oldest() {
                return;
            }
            sleep(IDLE_MIN / 10).await;
        }
    }

    /// Ends the connection that has been idle longest, if there is one.
    fn end_oldest(&mut self) -> bool {
        let idle_since = |place: &IdleSince| *place.lock().unwrap_or_else(PoisonError::into_inner);
        let idle =
            self.0.iter().enumerate().filter_map(|(at, (_, place))| Some((idle_since(place)?, at)));
        let oldest = idle.min().filter(|(since, _)| since.elapsed() >= IDLE_MIN);
        if let Some((_, at)) = oldest {
            self.0.swap_remove(at).0.abort();
        }
        oldest.is_some()
    }
}

async fn accept_all(listener: tokio::net::TcpListener, source: Source) {
    let mut places = Places::default();
    loop {
        places.make_room().await;
        match listener.accept().await {
            Ok((stream, _)) => {
                let place = IdleSince::new(Mutex::new(Some(Instant::now())));
                let task = tokio::spawn(connected(stream, source.clone(), Arc::clone(&place)));
                places.0.push((task, place));
            }
            Err(error) => {
                output::complain(&format!("a connection could not be accepted: {error}"));
                places.end_oldest();
                sleep(BACK_OFF).await;
            }
        }
    }
}

async fn connected(stream: TcpStream, source: Source, place: IdleSince) {
    let service = service_fn(move |request| {
        let (source, place) = (source.clone(), Arc::clone(&place));
        async move {
            set_idle(&place, None);
            let response = answer(&request, &source).await;
            set_idle(&place, Some(Instant::now()));
            Ok::<_, Infallible>(response)
        }
    });
    let connection = http1::Builder::new()
        .max_buf_size(REQUEST_BYTES_MAX)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    // A client that went away, or spoke no HTTP, or was too slow: there is nobody to be told.
    timeout(CONNECTION_TIMEOUT, connection).await.ok();
}

async fn answer(request: &Request<Incoming>, source: &Source) -> Response<String> {
    let is_read = [Method::GET, Method::HEAD].contains(request.method());
    let (status, kind, text) = match request.uri().path() {
        _ if !is_for_us(request) => (
            StatusCode::MISDIRECTED_REQUEST,
            TEXT,
            format!(
                "the request names another host: ask by an address, as localhost, or as {}\n",
                host_name()
            ),
        ),
        "/metrics" | "/" if !is_read => {
            (StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET and HEAD\n".to_owned())
        }
        "/metrics" => match source.get(limit_of(request)).await {
            Ok(text) => (StatusCode::OK, kind_for(request), text),
            Err(why) => (StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{why}\n")),
        },
        "/" => (
            StatusCode::OK,
            TEXT,
            "sublet: figures of tenants and GPUs are at /metrics\n".to_owned(),
        ),
        _ => (StatusCode::NOT_FOUND, TEXT, "figures are at /metrics\n".to_owned()),
    };
    let mut response = Response::new(text);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    if status == StatusCode::METHOD_NOT_ALLOWED {
        headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    }
    response
}

/// Is every host that the request names this machine? One that names none is for us too.
fn is_for_us(request: &Request<Incoming>) -> bool {
    let by_header = request.headers().get_all(HOST).iter();
    let by_header = by_header.map(|value| value.to_str().ok()?.parse::<Authority>().ok());
    let by_target = request.uri().authority().cloned().map(Some);
    by_header.chain(by_target).all(|named| named.is_some_and(|named| is_ours(named.host())))
}

/// Is `host` this machine's name, or an address? The owner of a name may lead it here. An address is where the asker
/// has gone itself: one of ours, or that of a port that leads here.
fn is_ours(host: &str) -> bool {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    bare.parse::<IpAddr>().is_ok()
        || host.eq_ignore_ascii_case("localhost")
        || host.eq_ignore_ascii_case(&host_name())
}

fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

/// Returns the time limit of a look: the time that the scraper waits, less what the way takes.
fn limit_of(request: &Request<Incoming>) -> Duration {
    let text = request.headers().get(TIMEOUT_HEADER).and_then(|value| value.to_str().ok());
    let seconds = text.and_then(|text| text.parse::<f64>().ok());
    let share = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds * SHARE).ok());
    let share = share.filter(|share| !share.is_zero());
    share.map_or(LOOK_TIMEOUT, |share| share.min(LOOK_TIMEOUT_MAX))
}

/// Returns the content type of the text, which can be read as either.
fn kind_for(request: &Request<Incoming>) -> &'static str {
    let accepted = request.headers().get(ACCEPT).and_then(|value| value.to_str().ok());
    let wants_open = accepted.is_some_and(|kinds| kinds.contains("application/openmetrics-text"));
    if wants_open { OPEN_METRICS } else { PLAIN }
}

/// An address to listen on; a port alone is on this machine.
pub(crate) fn address(text: &str) -> Result<SocketAddr, String> {
    let on_this_machine = text.parse::<u16>().map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    let by_name = || text.to_socket_addrs().ok()?.next();
    on_this_machine.ok().or_else(|| text.parse().ok()).or_else(by_name).ok_or_else(|| {
        format!("'{text}' is no address: say for example 127.0.0.1:9400, localhost:9400, [::1]:9400, or a port on this machine such as 9400")
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpStream;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    const GENEROUS: Duration = Duration::from_mins(1);

    fn ask(address: SocketAddr, request: &str) -> String {
        send(address, &format!("{request}\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
    }

    /// Sends `bytes` on a connection of their own, and returns what comes back.
    fn send(address: SocketAddr, bytes: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(GENEROUS)).unwrap();
        stream.write_all(bytes.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Serves what `look` finds while `then` is done with the address; ends in time.
    fn while_served(look: impl FnMut() -> Look + Send + 'static, then: impl FnOnce(SocketAddr)) {
        let (interrupt, raise) = Interrupt::new().unwrap();
        let (tell, told) = mpsc::channel();
        let server = thread::spawn(move || {
            let any = address("127.0.0.1:0").unwrap();
            serve(any, look, interrupt, |address| {
                tell.send(address).unwrap();
                Ok(())
            })
        });
        then(told.recv_timeout(GENEROUS).unwrap());
        nix::unistd::write(&raise, &[1]).unwrap();
        server.join().unwrap().unwrap();
    }

    #[test]
    fn a_scrape_gets_the_figures_and_other_requests_what_they_deserve() {
        while_served(
            || Ok("sublet_gpu 1\n# EOF\n".to_owned()),
            |address| {
                let plain = ask(address, "GET /metrics HTTP/1.1");
                assert!(plain.starts_with("HTTP/1.1 200"), "{plain}");
                assert!(
                    plain.contains(PLAIN) && plain.ends_with("sublet_gpu 1\n# EOF\n"),
                    "{plain}"
                );
                let accept = "Accept: application/openmetrics-text;version=1.0.0,*/*;q=0.1";
                let open = ask(address, &format!("GET /metrics?x=1 HTTP/1.1\r\n{accept}"));
                assert!(open.contains(OPEN_METRICS), "{open}");
                let head = ask(address, "HEAD /metrics HTTP/1.1");
                assert!(head.starts_with("HTTP/1.1 200") && !head.contains("sublet_gpu"), "{head}");
                assert!(ask(address, "GET / HTTP/1.1").contains("/metrics"));
                assert!(ask(address, "GET /other HTTP/1.1").starts_with("HTTP/1.1 404"));
                let post = ask(address, "POST /metrics HTTP/1.1\r\nContent-Length: 0");
                assert!(
                    post.starts_with("HTTP/1.1 405") && post.contains("allow: GET, HEAD"),
                    "{post}"
                );
                // One that leaves in the middle keeps nobody from an answer.
                drop(TcpStream::connect(address).unwrap().write_all(b"GET /metr"));
                assert!(ask(address, "GET /metrics HTTP/1.1").starts_with("HTTP/1.1 200"));
            },
        );
    }

    #[test]
    fn connections_that_ask_nothing_or_never_end_give_their_places_to_scrapes() {
        let begun = [
            "",
            "GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-More: ",
            "POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\nx",
        ];
        while_served(
            || Ok("sublet_gpu 1\n".to_owned()),
            |address| {
                for bytes in begun {
                    let connect = || {
                        let mut stream = TcpStream::connect(address).unwrap();
                        // It may have been answered, and its place given away.
                        stream.write_all(bytes.as_bytes()).ok();
                        stream
                    };
                    let _others: Vec<_> = (0..3 * CONNECTIONS_MAX).map(|_| connect()).collect();
                    for _ in 0..3 {
                        let found = ask(address, "GET /metrics HTTP/1.1");
                        assert!(found.starts_with("HTTP/1.1 200"), "{bytes}: {found}");
                    }
                }
            },
        );
    }

    #[test]
    fn those_who_ask_within_a_second_get_what_the_last_look_has_found() {
        let looks = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&looks);
        let look = move || Ok(format!("{}\n", counted.fetch_add(1, Ordering::SeqCst)));
        while_served(look, |address| {
            let begun = Instant::now();
            for _ in 0..30 {
                assert!(ask(address, "GET /metrics HTTP/1.1").starts_with("HTTP/1.1 200"));
            }
            let looks = u64::from(looks.load(Ordering::SeqCst));
            assert!(looks <= 1 + begun.elapsed().as_secs(), "{looks} looks");
        });
    }

    #[test]
    fn a_request_that_names_another_host_is_refused_by_one_line() {
        while_served(
            || Ok("sublet_gpu 1\n".to_owned()),
            |address| {
                let port = address.port();
                let name = host_name();
                for host in [
                    format!("127.0.0.1:{port}"),
                    format!("localhost:{port}"),
                    format!("[::1]:{port}"),
                    "LocalHost".to_owned(),
                    format!("{name}:{port}"),
                    // A port of another address may lead here.
                    "10.0.0.7:9400".to_owned(),
                ] {
                    let found =
                        send(address, &format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n"));
                    assert!(found.starts_with("HTTP/1.1 200"), "{host}: {found}");
                }
                assert!(send(address, "GET /metrics HTTP/1.0\r\n\r\n").starts_with("HTTP/1.0 200"));
                let evil = format!("evil.example:{port}");
                for hosts in [
                    format!("GET /metrics HTTP/1.1\r\nHost: {evil}"),
                    "GET /metrics HTTP/1.1\r\nHost: localhost.evil.example".to_owned(),
                    "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1.evil.example".to_owned(),
                    "GET /metrics HTTP/1.1\r\nHost: localhost@evil.example".to_owned(),
                    "GET /metrics HTTP/1.1\r\nHost:".to_owned(),
                    format!("GET / HTTP/1.1\r\nHost: localhost\r\nHost: {evil}"),
                    format!("GET http://{evil}/metrics HTTP/1.1\r\nHost: localhost"),
                    format!("POST /other HTTP/1.1\r\nHost: {evil}"),
                ] {
                    let found = send(address, &format!("{hosts}\r\n\r\n"));
                    assert!(found.starts_with("HTTP/1.1 421"), "{hosts}: {found}");
                    let (_, text) = found.split_once("\r\n\r\n").unwrap();
                    assert_eq!(
                        text,
                        format!(
                            "the request names another host: ask by an address, as localhost, or as {name}\n"
                        )
                    );
                }
            },
        );
    }

    #[test]
    fn a_look_that_fails_or_takes_too_long_is_said_by_the_scrapers_deadline() {
        let (go_on, wait) = mpsc::channel::<()>();
        let wait = Mutex::new(wait);
        let looks = Arc::new(AtomicU32::new(0));
        let counted = looks.clone();
        let look = move || match counted.fetch_add(1, Ordering::SeqCst) {
            0 => Err("the run directory is gone".to_owned()),
            1 => {
                wait.lock().unwrap().recv().ok();
                Ok("late\n".to_owned())
            }
            _ => Ok("again\n".to_owned()),
        };
        while_served(look, |address| {
            let refused = ask(address, "GET /metrics HTTP/1.1");
            assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
            assert!(refused.contains("the run directory is gone"), "{refused}");
            let short = format!("GET /metrics HTTP/1.1\r\n{TIMEOUT_HEADER}: 0.2");
            // Until the next look, which comes a second later.
            let deadline = Instant::now() + GENEROUS;
            while looks.load(Ordering::SeqCst) < 2 {
                assert!(Instant::now() < deadline, "it was not looked a second time");
                ask(address, &short);
            }
            let late = ask(address, &short);
            assert!(late.starts_with("HTTP/1.1 503") && late.contains("within 180 ms"), "{late}");
            // Meanwhile nobody looks a second time.
            assert!(ask(address, &short).starts_with("HTTP/1.1 503"));
            assert_eq!(looks.load(Ordering::SeqCst), 2);
            go_on.send(()).unwrap();
            let found = ask(address, "GET /metrics HTTP/1.1");
            assert!(found.ends_with("late\n") || found.ends_with("again\n"), "{found}");
        });
    }

    #[test]
    fn an_address_that_is_taken_is_refused_by_name() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let (interrupt, _raise) = Interrupt::new().unwrap();
        let address = taken.local_addr().unwrap();
        let refused = serve(address, || Ok(String::new()), interrupt, |_| panic!("it listens"));
        let text = refused.unwrap_err().to_string();
        assert!(text.contains(&address.to_string()) && text.contains("--listen"), "{text}");
    }

    #[test]
    fn addresses_are_read_and_anything_else_is_named() {
        assert_eq!(address("9400"), address(ADDRESS));
        assert!(address("localhost:9400").is_ok_and(|found| found.ip().is_loopback()));
        assert!(address("[::1]:9400").is_ok_and(|found| found.ip().is_loopback()));
        for text in ["", "localhost", "127.0.0.1", "1.2.3.4:99999", "99999", ":9400"] {
            assert!(address(text).unwrap_err().contains("is no address"), "{text}");
        }
    }
}
