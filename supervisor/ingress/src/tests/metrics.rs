use bytes::Bytes;
use tokio::sync::broadcast;

use super::*;

fn event(text: &str) -> Bytes {
    format!("data: {text}\n\n").into()
}

/// Two listeners for a text that counts its requests, a page, and events.
struct Scraped {
    events: broadcast::Sender<Bytes>,
    dir: tempfile::TempDir,
    stop: watch::Sender<Phase>,
    running: JoinHandle<()>,
}

impl Scraped {
    async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener =
            |name| Listener::Unix { path: dir.path().join(name), mode: None, group: None, peers: None };
        let listeners = MetricsListeners::bind(
            &[listener("a"), listener("b")],
            &mut Inherited::default(),
            &Arc::default(),
        )
        .await
        .unwrap();
        let asked = std::sync::atomic::AtomicUsize::new(0);
        let events = broadcast::Sender::new(4);
        let news = events.clone();
        let shown = Shown {
            metrics: Arc::new(move || {
                format!("asked {}\n", asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
            }),
            files: &[File { path: "/", content_type: "text/html", text: "<p>a page" }],
            events: Arc::new(move || Events { kept: vec![event("kept")], news: news.subscribe() }),
        };
        let (stop, stopped) = watch::channel(Phase::Serving);
        let running = tokio::spawn(listeners.run(shown, stopped));
        Self { events, dir, stop, running }
    }

    async fn connect(&self, name: &str) -> UnixStream {
        UnixStream::connect(self.dir.path().join(name)).await.unwrap()
    }

    async fn stop(self) {
        self.stop.send_replace(Phase::Stopping);
        timeout(PATIENCE, self.running).await.unwrap().unwrap();
        assert_eq!(self.dir.path().read_dir().unwrap().count(), 0, "the sockets are gone");
    }
}

#[tokio::test]
async fn one_path_and_one_method_on_every_listener() {
    let server = Scraped::start().await;
    let (mut a, mut b) = (server.connect("a").await, server.connect("b").await);
    for (count, stream) in [&mut a, &mut b].into_iter().enumerate() {
        for (request, status, says) in [
            ("GET /", 200, "<p>a page"),
            ("PUT /", 405, "allow: GET"),
            ("GET /events/", 404, "/metrics"),
            ("GET /../etc/passwd", 404, "/metrics"),
            ("GET /metrics/", 404, "/metrics"),
            ("POST /v2/models/m/infer", 404, "/metrics"),
            ("POST /metrics", 405, "allow: GET"),
            ("DELETE /metrics", 405, "allow: GET"),
            ("GET /metrics?x=1", 200, &format!("\r\n\r\nasked {count}\n")),
        ] {
            let answer = http::ask(stream, &format!("{request} HTTP/1.1\r\nhost: x\r\n\r\n")).await;
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {answer}");
            assert!(answer.contains(says), "{request}: {answer}");
            let kind = "content-type: text/plain; version=0.0.4; charset=utf-8\r\n";
            assert_eq!(answer.contains(kind), request.starts_with("GET /metrics?"), "{answer}");
        }
    }
    server.stop().await;
    assert_eq!(rest(&mut a).await, "");
}

#[tokio::test]
async fn a_silent_scraper_does_not_delay_the_end() {
    let server = Scraped::start().await;
    let mut silent = server.connect("a").await;
    silent.write_all(b"GET /met").await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn idle_connections_make_room_for_a_scraper() {
    let server = Scraped::start().await;
    let mut idle = Vec::new();
    for _ in 0..200 {
        idle.push(server.connect("a").await);
    }
    let mut scraper = server.connect("a").await;
    let answer = http::ask(&mut scraper, "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert!(answer.contains("asked 0"), "{answer}");
    assert_eq!(rest(&mut idle[0]).await, "");
    server.stop().await;
}

#[tokio::test]
async fn events_arrive_as_they_happen_and_end_with_serving() {
    let server = Scraped::start().await;
    let mut page = server.connect("a").await;
    page.write_all(b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let head = until(&mut page, "data: kept").await;
    assert!(head.contains("content-type: text/event-stream\r\n"), "{head}");
    assert!(head.contains("content-security-policy: default-src 'none'"), "{head}");
    server.events.send(event("news")).unwrap();
    until(&mut page, "data: news").await;
    server.stop().await;
    assert!(rest(&mut page).await.ends_with("0\r\n\r\n"), "the stream is whole");
}

#[tokio::test]
async fn a_page_too_many_is_refused_and_none_makes_room_for_it_or_for_scrapers() {
    let server = Scraped::start().await;
    const FOLLOW: &[u8] = b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n";
    let open = async || {
        let mut page = server.connect("a").await;
        page.write_all(FOLLOW).await.unwrap();
        let answer = until(&mut page, "\r\n\r\n").await;
        (page, answer)
    };
    let mut pages = Vec::new();
    let (mut refused, answer) = loop {
        match open().await {
            (page, answer) if answer.starts_with("HTTP/1.1 200 ") => pages.push(page),
            refused => break refused,
        }
    };
    assert!(answer.starts_with("HTTP/1.1 503 ") && pages.len() > 40, "{} and {answer}", pages.len());
    until(&mut refused, "too many pages are open").await;
    let mut scrapers = Vec::new();
    for _ in 0..80 {
        let mut scraper = server.connect("b").await;
        let answer = http::ask(&mut scraper, "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(answer.contains("asked "), "{answer}");
        scrapers.push(scraper);
    }
    // An idle connection has this time to end.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    server.events.send(event("news")).unwrap();
    for page in &mut pages {
        until(page, "data: news").await;
    }
    drop(pages.pop());
    let again = async {
        while !open().await.1.starts_with("HTTP/1.1 200 ") {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(PATIENCE, again).await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn a_page_that_reads_nothing_delays_nothing_and_starts_again() {
    let server = Scraped::start().await;
    let mut page = server.connect("a").await;
    page.write_all(b"GET /events HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    until(&mut page, "data: kept").await;
    let large = event(&"x".repeat(1 << 20));
    for _ in 0..64 {
        server.events.send(large.clone()).ok();
        tokio::task::yield_now().await;
    }
    let rest = timeout(PATIENCE, rest(&mut page)).await.unwrap();
    assert!(rest.len() < 32 << 20 && rest.ends_with("0\r\n\r\n"), "{}", rest.len());
    server.stop().await;
}

/// Reads up to a text.
async fn until(stream: &mut UnixStream, end: &str) -> String {
    let mut read = Vec::new();
    while !String::from_utf8_lossy(&read).contains(end) {
        let byte = timeout(PATIENCE, stream.read_u8()).await.unwrap().unwrap();
        read.push(byte);
    }
    String::from_utf8(read).unwrap()
}

#[tokio::test]
async fn a_head_is_answered_without_a_body() {
    let server = Scraped::start().await;
    for path in ["/", "/metrics", "/events"] {
        let mut asking = server.connect("a").await;
        let request = format!("HEAD {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        asking.write_all(request.as_bytes()).await.unwrap();
        let answer = rest(&mut asking).await;
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\n"), "{path}: {answer}");
    }
    server.stop().await;
}
