//! An HTTP server of figures: `GET /metrics`, for Prometheus to scrape.
//!
//! ```text
//!   a bounded number of threads, each of which accepts a connection, reads one request and writes the answer, in a bounded time
//!     +--ask--> the one that looks: one look at a time, and at most one each second
//! ```
//!
//! Any user of the machine may connect. So a connection without a request is closed soon, for those that wait. Any page in a
//! browser may resolve its own name to this address. So a request with a host name that is not ours is refused.
//!
//! If a look takes too long, the answer at the scraper's deadline is 503. The look goes on, and the next scrape gets its result
//! or a newer one. A connection has one request, which is enough for a scrape every few seconds. So this module has its own small
//! part of HTTP: servers in libraries have no deadlines, or need an asynchronous runtime.

use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, thread};

use nix::sys::socket::{Backlog, listen};
use tenants::coordinator::Interrupt;

use crate::failure::{EXIT_UNCHANGED, Failure};
use crate::output;

/// The default address to listen on, for this machine alone.
pub(crate) const ADDRESS: &str = "127.0.0.1:9400";
/// Connections at a time. More wait.
const CONNECTIONS_MAX: usize = 128;
/// The time limit of a client, for its request and for reading the answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(1);
/// The most that is read of a request.
const REQUEST_BYTES_MAX: u64 = 64 << 10;
/// The shortest time between two looks. An earlier request gets the result of the last look.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The longest time of a look if the scraper gives none. Prometheus waits 10 s by default.
const LOOK_TIMEOUT: Duration = Duration::from_secs(9);
/// The longest time of a look, whatever the scraper gives.
const LOOK_TIMEOUT_MAX: Duration = Duration::from_secs(50);
/// The part of a scraper's own deadline that a look may take.
const SHARE: f64 = 0.9;
const TIMEOUT_HEADER: &str = "X-Prometheus-Scrape-Timeout-Seconds";
/// The pause after a connection could not be accepted, for example for lack of descriptors.
const BACK_OFF: Duration = Duration::from_secs(1);

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; version=0.0.4; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// The outcome of one look: figures, or why there are none.
type Look = Result<String, String>;
/// The way to request figures from the thread that looks.
type Source = Sender<Sender<Look>>;

fn look_for(asked: &Receiver<Sender<Look>>, mut look: impl FnMut() -> Look) {
    let mut last: Option<(Look, Instant)> = None;
    while let Ok(asker) = asked.recv() {
        let fresh = last.take().filter(|(_, at)| at.elapsed() < LOOK_EVERY);
        let (found, _) = last.insert(fresh.unwrap_or_else(|| (look(), Instant::now())));
        // A client that has waited too long is gone.
        asker.send(found.clone()).ok();
    }
}

fn ask(source: &Source, limit: Duration) -> Look {
    let (say, said) = mpsc::channel();
    source.send(say).ok();
    said.recv_timeout(limit).unwrap_or_else(|_| {
        Err(format!(
            "no answer within {} ms: a process may stand still: `sublet ps` names it",
            limit.as_millis()
        ))
    })
}

/// Serves the results of `look` until `interrupt` is raised. Calls `say` with the address, once it listens.
pub(super) fn serve(
    address: SocketAddr,
    look: impl FnMut() -> Look + Send + 'static,
    interrupt: &Interrupt,
    say: impl FnOnce(SocketAddr) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let failed = |error: io::Error| {
        let message = format!(
            "{address} cannot be listened on: {error}; name another address, such as --listen 127.0.0.1:9401"
        );
        Failure::new(message, EXIT_UNCHANGED)
    };
    let listener = TcpListener::bind(address).map_err(failed)?;
    // As many connections may wait as the system allows.
    listen(&listener, Backlog::MAXCONN).map_err(|errno| failed(errno.into()))?;
    let (source, asked) = mpsc::channel();
    thread::Builder::new().spawn(move || look_for(&asked, look)).map_err(failed)?;
    say(listener.local_addr().map_err(failed)?)?;
    let listener = Arc::new(Mutex::new((listener, interrupt.clone())));
    for _ in 0..CONNECTIONS_MAX {
        let (listener, source) = (Arc::clone(&listener), source.clone());
        let serve_all = move || {
            loop {
                // An error means that the client has gone or was too slow. There is no one to report it to.
                accept(&listener).map(|stream| answer_to(stream, &source));
            }
        };
        thread::Builder::new().spawn(serve_all).map_err(failed)?;
    }
    while !interrupt.is_raised() {
        interrupt.wait(Duration::from_hours(1));
    }
    Ok(())
}

/// Waits for the next connection. One thread waits at a time.
fn accept(listener: &Mutex<(TcpListener, Interrupt)>) -> Option<TcpStream> {
    let listener = listener.lock().unwrap_or_else(PoisonError::into_inner);
    match listener.0.accept() {
        Ok((stream, _)) => Some(stream),
        Err(error) => {
            output::complain(&format!("a connection could not be accepted: {error}"));
            listener.1.wait(BACK_OFF);
            None
        }
    }
}

/// A client connection with a deadline for reads and writes.
struct Client(TcpStream, Instant);

impl Client {
    /// Returns the time until the deadline. A wait of zero is an error.
    fn left(&self) -> Duration {
        self.1.saturating_duration_since(Instant::now())
    }
}

impl Read for Client {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.set_read_timeout(Some(self.left()))?;
        self.0.read(bytes)
    }
}

impl Write for Client {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.set_write_timeout(Some(self.left()))?;
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Answers one request. None if there is no request, or no client waits for the answer.
fn answer_to(stream: TcpStream, source: &Source) -> Option<()> {
    let mut client = Client(stream, Instant::now() + CLIENT_TIMEOUT);
    let mut head = String::new();
    let mut bytes = BufReader::new((&mut client).take(REQUEST_BYTES_MAX));
    while !head.ends_with("\r\n\r\n") {
        bytes.read_line(&mut head).ok().filter(|read| *read > 0)?;
    }
    let answer = answer(&head, source)?;
    client.1 = Instant::now() + CLIENT_TIMEOUT;
    client.write_all(answer.as_bytes()).ok()
}

/// Returns the answer to the request with this head.
fn answer(head: &str, source: &Source) -> Option<String> {
    let mut lines = head.lines();
    let (method, rest) = lines.next()?.split_once(' ')?;
    let (target, _) = rest.split_once(" HTTP/1.")?;
    let headers: Vec<_> = lines.filter_map(|line| line.split_once(':')).collect();
    let all = |wanted: &'static str| {
        let named =
            headers.iter().filter(move |(name, _)| name.trim().eq_ignore_ascii_case(wanted));
        named.map(|(_, value)| value.trim())
    };
    let (status, kind, text) = if !target.starts_with('/') || !all("host").all(is_ours) {
        let name = host_name();
        let text = format!(
            "the request names another host: ask by an address, as localhost, or as {name}\n"
        );
        ("421 Misdirected Request", TEXT, text)
    } else if !["GET", "HEAD"].contains(&method) {
        ("405 Method Not Allowed\r\nallow: GET, HEAD", TEXT, "only GET and HEAD\n".to_owned())
    } else if target.split('?').next() != Some("/metrics") {
        ("404 Not Found", TEXT, "figures of tenants and GPUs are at /metrics\n".to_owned())
    } else {
        match ask(source, limit(all(TIMEOUT_HEADER).next())) {
            Ok(text) => {
                // The text is valid in both formats.
                let is_open =
                    all("accept").any(|kinds| kinds.contains("application/openmetrics-text"));
                ("200 OK", if is_open { OPEN_METRICS } else { PLAIN }, text)
            }
            Err(why) => ("503 Service Unavailable", TEXT, format!("{why}\n")),
        }
    };
    let size_bytes = text.len();
    let body = if method == "HEAD" { "" } else { &text };
    Some(format!(
        "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {size_bytes}\r\nconnection: close\r\n\r\n{body}"
    ))
}

/// Is the host of `authority`, such as `localhost:9400`, this machine's name, or an address? The owner of any other name may
/// resolve it to this machine. An address is the one that the client itself has connected to: ours, or that of a forwarded port.
fn is_ours(authority: &str) -> bool {
    let port = |(_, port): &(&str, &str)| port.parse::<u16>().is_ok();
    let host = authority.rsplit_once(':').filter(port).map_or(authority, |(host, _)| host);
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    bare.parse::<IpAddr>().is_ok()
        || ["localhost", &host_name()].iter().any(|name| host.eq_ignore_ascii_case(name))
}

fn host_name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

/// Returns the time limit of a look: a part of the scraper's own time limit.
fn limit(said: Option<&str>) -> Duration {
    let seconds = said.and_then(|text| text.parse::<f64>().ok());
    let share = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds * SHARE).ok());
    let share = share.filter(|share| !share.is_zero());
    share.map_or(LOOK_TIMEOUT, |share| share.min(LOOK_TIMEOUT_MAX))
}

/// Parses an address to listen on. A port alone means this machine only.
pub(crate) fn address(text: &str) -> Result<SocketAddr, String> {
    let on_this_machine = text.parse::<u16>().map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    let by_name = || text.to_socket_addrs().ok()?.next();
    on_this_machine.ok().or_else(|| text.parse().ok()).or_else(by_name).ok_or_else(|| {
        format!("'{text}' is no address: say for example 127.0.0.1:9400, localhost:9400, [::1]:9400, or a port on this machine such as 9400")
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    const GENEROUS: Duration = Duration::from_mins(1);

    fn asked(address: SocketAddr, request: &str) -> String {
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
            serve(any, look, &interrupt, |address| {
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
                let plain = asked(address, "GET /metrics HTTP/1.1");
                assert!(plain.starts_with("HTTP/1.1 200"), "{plain}");
                assert!(
                    plain.contains(PLAIN) && plain.ends_with("sublet_gpu 1\n# EOF\n"),
                    "{plain}"
                );
                let accept = "Accept: application/openmetrics-text;version=1.0.0,*/*;q=0.1";
                let open = asked(address, &format!("GET /metrics?x=1 HTTP/1.1\r\n{accept}"));
                assert!(open.contains(OPEN_METRICS), "{open}");
                let head = asked(address, "HEAD /metrics HTTP/1.1");
                assert!(head.starts_with("HTTP/1.1 200") && !head.contains("sublet_gpu"), "{head}");
                assert!(asked(address, "GET / HTTP/1.1").contains("/metrics"));
                assert!(asked(address, "GET /other HTTP/1.1").starts_with("HTTP/1.1 404"));
                let post = asked(address, "POST /metrics HTTP/1.1\r\nContent-Length: 0");
                assert!(
                    post.starts_with("HTTP/1.1 405") && post.contains("allow: GET, HEAD"),
                    "{post}"
                );
                // One that leaves in the middle keeps nobody from an answer.
                drop(TcpStream::connect(address).unwrap().write_all(b"GET /metr"));
                assert!(asked(address, "GET /metrics HTTP/1.1").starts_with("HTTP/1.1 200"));
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
                    let mut others: Vec<_> = (0..3 * CONNECTIONS_MAX).map(|_| connect()).collect();
                    for _ in 0..3 {
                        let found = asked(address, "GET /metrics HTTP/1.1");
                        assert!(found.starts_with("HTTP/1.1 200"), "{bytes}: {found}");
                    }
                    // By now the first is at its end, without an answer or behind one.
                    let mut said = Vec::new();
                    others[0].set_read_timeout(Some(GENEROUS)).unwrap();
                    let ended = others[0].read_to_end(&mut said);
                    let is_reset =
                        |error: &io::Error| error.kind() == io::ErrorKind::ConnectionReset;
                    assert!(ended.as_ref().map_or_else(is_reset, |_| true), "{bytes}: {ended:?}");
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
                assert!(asked(address, "GET /metrics HTTP/1.1").starts_with("HTTP/1.1 200"));
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
                assert!(send(address, "GET /metrics HTTP/1.0\r\n\r\n").starts_with("HTTP/1.1 200"));
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
            let refused = asked(address, "GET /metrics HTTP/1.1");
            assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
            assert!(refused.contains("the run directory is gone"), "{refused}");
            let short = format!("GET /metrics HTTP/1.1\r\n{TIMEOUT_HEADER}: 0.2");
            // Until the next look, which comes a second later.
            let deadline = Instant::now() + GENEROUS;
            while looks.load(Ordering::SeqCst) < 2 {
                assert!(Instant::now() < deadline, "it was not looked a second time");
                asked(address, &short);
            }
            let late = asked(address, &short);
            assert!(late.starts_with("HTTP/1.1 503") && late.contains("within 180 ms"), "{late}");
            // Meanwhile nobody looks a second time.
            assert!(asked(address, &short).starts_with("HTTP/1.1 503"));
            assert_eq!(looks.load(Ordering::SeqCst), 2);
            go_on.send(()).unwrap();
            let found = asked(address, "GET /metrics HTTP/1.1");
            assert!(found.ends_with("late\n") || found.ends_with("again\n"), "{found}");
        });
    }

    #[test]
    fn an_address_that_is_taken_is_refused_by_name() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let (interrupt, _raise) = Interrupt::new().unwrap();
        let address = taken.local_addr().unwrap();
        let refused = serve(address, || Ok(String::new()), &interrupt, |_| panic!("it listens"));
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
