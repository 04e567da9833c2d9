use super::*;

/// Sends and reads one answer.
pub(super) async fn ask(stream: &mut UnixStream, request: &str) -> String {
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let whole = |answer: &[u8]| {
        let text = String::from_utf8_lossy(answer);
        let (head, body) = text.split_once("\r\n\r\n")?;
        let length = head.split("\r\n").find_map(|line| line.strip_prefix("content-length: "));
        (body.len() >= length.map_or(0, |length| length.parse().unwrap())).then(|| text.to_string())
    };
    loop {
        let read = timeout(PATIENCE, stream.read_buf(&mut answer)).await.unwrap().unwrap();
        if let Some(answer) = whole(&answer) {
            return answer;
        }
        assert!(read > 0, "the connection ended in an answer: {answer:?}");
    }
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")
}

fn post(path: &str, headers: &str, body: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n{headers}\r\n{body}", body.len())
}

#[tokio::test]
async fn a_connection_outlives_the_requests_that_are_refused() {
    let server = Server::start(9).await;
    let mut stream = server.connect("http").await;
    for (request, status, body) in [
        (get("/v2/health/live"), 200, ""),
        (get("/v2/health/ready"), 400, ""),
        (
            get("/v2"),
            200,
            r#""extensions":["binary_tensor_data","model_configuration","model_repository","schedule_policy","statistics"]"#,
        ),
        (get("/v2/models/m"), 404, r#"{"error":"Request for unknown model: 'm' is not found"}"#),
        (get("/v2/models/a%20b/ready"), 404, "'a b'"),
        (get("/v2/models/m/config"), 404, "unknown model"),
        (get("/v2/models/m/stats"), 404, "unknown model"),
        (get("/v2/models/stats"), 200, r#"{"model_stats":[]}"#),
        (get("/v2/models/%FF"), 404, "error"),
        (get("/"), 404, "error"),
        (post("/v2/models/m/infer", "", "garbage"), 404, "unknown model"),
        (post("/v2/models/m/versions/7/infer", "", "{}"), 404, "unknown model"),
        (post("/v2/repository/index", "", ""), 200, "[]"),
        (post("/v2/repository/index", "", "{\"ready\": 7}"), 400, "failed to parse"),
        (post("/v2/repository/models/m/load", "", ""), 503, "not allowed"),
        (post("/v2/repository/models/m/unload", "", "{}"), 503, "model_control: explicit"),
        (post("/v2/repository/models/m/load", "", "{\"parameters\": {\"file:1/m\": \"\"}}"), 400, "file:1/m"),
        (post("/v2/repository/models/m/other", "", "{}"), 404, "not found"),
        (get("/v2/cudasharedmemory/status"), 200, "\r\n\r\n[]"),
        (get("/v2/cudasharedmemory/region/x/status"), 404, "Unable to find cuda shared memory region: 'x'"),
        (post("/v2/cudasharedmemory/unregister", "", ""), 200, "content-length: 0"),
        (post("/v2/cudasharedmemory/region/x/unregister", "", ""), 200, "content-length: 0"),
        (
            post("/v2/cudasharedmemory/region/x/register", "", "{}"),
            400,
            "'x', CUDA shared memory is not supported",
        ),
        (get("/v2/cudasharedmemory/unregister"), 405, "accepts POST"),
        (get("/v2/trace/setting"), 503, "does not support tracing"),
        (post("/v2/models/m/trace/setting", "", "{}"), 503, "does not support tracing"),
        (post("/v2/logging", "", "{}"), 503, "does not support dynamic logging"),
        (get("/v2/repository/index"), 405, "accepts POST"),
        (get("/v2/models/m/infer"), 405, "accepts POST, not GET"),
        (
            post("/v2/models/m/generate", "", "{}"),
            404,
            r#"{"error":"Request for unknown model: 'm' is not found"}"#,
        ),
        (post("/v2/models/m/versions/1/generate_stream", "", "{}"), 404, "unknown model"),
        (post("/v2", "", "{}"), 405, "accepts GET, HEAD, not POST"),
        (get("/v2/health/live"), 200, ""),
    ] {
        let answer = ask(&mut stream, &request).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {answer}");
        assert!(answer.contains(body), "{request}: {answer}");
    }
    server.stop().await;
}

#[tokio::test]
async fn paths_of_openai_have_errors_of_its_form() {
    let server = Server::start(9).await;
    let mut stream = server.connect("http").await;
    for (request, status, body) in [
        (get("/v1/models"), 200, r#"{"data":[],"object":"list"}"#),
        (get("/v1/models/m"), 404, r#""code":"model_not_found""#),
        (get("/v1/embeddings"), 405, r#""type":"invalid_request_error""#),
        (post("/v1/embeddings", "", "garbage"), 400, r#""message":"failed to parse the request JSON"#),
        (post("/v1/embeddings", "", r#"{"input": "a"}"#), 400, r#""param":"model""#),
        (post("/v1/completions", "", r#"{"model": "m"}"#), 404, r#""code":"model_not_found""#),
        (post("/v1/chat/completions", "", "{}"), 404, r#""type":"invalid_request_error""#),
    ] {
        let answer = ask(&mut stream, &request).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request}: {answer}");
        assert!(answer.contains(body), "{request}: {answer}");
    }
    server.stop().await;
}

#[tokio::test]
async fn head_is_answered_as_get_without_the_body() {
    let server = Server::start(9).await;
    for path in [
        "/v2/health/live",
        "/v2/health/ready",
        "/v2",
        "/v2/models/stats",
        "/v2/models/m",
        "/v2/models/m/ready",
        "/v2/cudasharedmemory/status",
        "/v2/models/m/infer",
        "/v2/trace/setting",
        "/nowhere",
    ] {
        let mut answers = Vec::new();
        for method in ["GET", "HEAD"] {
            let mut stream = server.connect("http").await;
            let request = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let answer = rest(&mut stream).await;
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            let mut undated: Vec<_> = head.lines().filter(|line| !line.starts_with("date: ")).collect();
            undated.sort_unstable();
            answers.push((undated.join("\n"), body.to_owned()));
        }
        let [(get, _), (head, body)] = &answers[..] else { unreachable!() };
        assert!(get.contains("content-length: "), "{path}: {get}");
        assert_eq!(body, "", "{path}");
        if path != "/v2/models/m/infer" {
            assert_eq!(get, head, "{path}");
        }
    }
    let mut stream = server.connect("http").await;
    stream.write_all(b"HEAD /v2 HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    stream.write_all(LIVE_AND_CLOSE.as_bytes()).await.unwrap();
    let both = rest(&mut stream).await;
    assert_eq!(both.matches("HTTP/1.1 200 ").count(), 2, "the connection goes on: {both}");
    server.stop().await;
}

const LIVE_AND_CLOSE: &str = "GET /v2/health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";

#[tokio::test]
async fn a_body_over_the_limit_is_refused_unread_and_ends_the_connection() {
    let server = Server::start(9).await;
    for headers in ["content-length: 1001", "content-length: 99999999999999999"] {
        let mut stream = server.connect("http").await;
        let head = format!("POST /v2/repository/index HTTP/1.1\r\nhost: x\r\n{headers}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let answer = rest(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 413 ") && answer.contains("larger than 1000 bytes"), "{answer}");
        assert!(answer.contains("connection: close"), "{answer}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_request_for_an_unknown_model_is_refused_before_its_body_arrives() {
    let server = Server::with_request_bytes(9, 1 << 20).await;
    let mut stream = server.connect("http").await;
    let head = "POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    let answer = rest(&mut stream).await;
    assert!(answer.starts_with("HTTP/1.1 404 ") && answer.contains("connection: close"), "{answer}");
    server.stop().await;
}

#[tokio::test]
async fn requests_other_than_inferences_are_short() {
    let server = Server::with_request_bytes(9, 1 << 20).await;
    for (path, bytes, status) in [
        ("/v2/repository/models/m/load", 256 << 10, 400),
        ("/v2/repository/models/m/load", (256 << 10) + 1, 413),
        ("/v2/systemsharedmemory/region/r/register", 1 << 20, 413),
        ("/v2/models/m/infer", 1 << 20, 404),
    ] {
        let mut stream = server.connect("http").await;
        let answer = ask(&mut stream, &post(path, "", &"x".repeat(bytes))).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{path}, {bytes}: {answer}");
        assert_eq!(answer.contains("not an inference request"), status == 413, "{answer}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_chunked_body_is_refused_when_it_passes_the_limit() {
    let server = Server::start(9).await;
    let mut stream = server.connect("http").await;
    let chunk = format!("{:x}\r\n{}\r\n", 600, "x".repeat(600));
    let head = "POST /v2/repository/index HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n";
    // The last chunk never arrives.
    stream.write_all(format!("{head}{chunk}{chunk}").as_bytes()).await.unwrap();
    assert!(rest(&mut stream).await.starts_with("HTTP/1.1 413 "));
    server.stop().await;
}

#[tokio::test]
async fn a_body_of_just_the_limit_is_read() {
    let server = Server::start(9).await;
    let mut stream = server.connect("http").await;
    let body = "x".repeat(usize::try_from(LIMIT).unwrap());
    assert!(ask(&mut stream, &post("/v2/models/m/infer", "", &body)).await.starts_with("HTTP/1.1 404 "));
    server.stop().await;
}

#[tokio::test]
async fn bytes_that_are_not_http_are_refused_and_harm_no_other_client() {
    let server = Server::start(9).await;
    let mut witness = server.connect("http").await;
    for garbage in [
        "\0\u{1}\u{2} garbage\r\n\r\n",
        "GET\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
    ] {
        let mut stream = server.connect("http").await;
        stream.write_all(garbage.as_bytes()).await.unwrap();
        let answer = rest(&mut stream).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400 "), "{garbage}: {answer}");
        assert!(ask(&mut witness, &get("/v2/health/live")).await.starts_with("HTTP/1.1 200 "));
    }
    server.stop().await;
}

// The paused clock jumps ahead when all tasks are idle, so the test does not wait.
#[tokio::test(start_paused = true)]
async fn an_idle_connection_is_closed_whether_new_or_used() {
    let server = Server::start(9).await;
    for begun in ["", "GET /v2 HT", "GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"] {
        let mut stream = server.connect("http").await;
        stream.write_all(begun.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let ended = timeout(Duration::from_secs(100), stream.read_to_end(&mut answer)).await;
        assert!(ended.is_ok(), "{begun}");
        assert_eq!(answer.starts_with(b"HTTP/1.1 200 "), begun.contains("live"), "{begun}");
    }
    server.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_idle_connection_is_closed_after_keep_alive() {
    for keep_alive in [Duration::from_secs(2), Duration::from_secs(620)] {
        let server = Server::with_limits(LimitsConfig { keep_alive, ..LIMITS }).await;
        let mut stream = server.connect("http").await;
        assert!(ask(&mut stream, &get("/v2/health/live")).await.starts_with("HTTP/1.1 200 "));
        let idle = tokio::time::Instant::now();
        let mut end = Vec::new();
        timeout(2 * keep_alive, stream.read_to_end(&mut end)).await.unwrap().unwrap();
        let stayed = idle.elapsed();
        assert!(end.is_empty() && stayed >= keep_alive.mul_f64(0.9), "{keep_alive:?}: {stayed:?}");
        server.stop().await;
    }
}
