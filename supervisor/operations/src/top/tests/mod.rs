//! Tests the screen at the usual size of a terminal and at other sizes.

mod answers;

use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::text::Text;
use serde_json::{Value, json};

use super::app::{App, KeyAction};
use super::snapshot::TopReply;
use super::view;
use answers::{boot, busy, gpu, merge, model, seen};

const USUAL: (u16, u16) = (80, 24);
const LARGE: (u16, u16) = (120, 40);

/// Returns the state after two replies that are one second apart.
fn app(models: impl Fn(u64) -> Vec<Value>, gpus: &[Value]) -> App {
    let mut app = App::new(Duration::from_secs(1));
    for second in [1, 2] {
        app.update(Ok(seen(models(second), gpus.to_vec())), Duration::from_secs(second));
    }
    app
}

/// Returns the content of the screen for a terminal of this size.
fn shown(app: &App, (width, height): (u16, u16)) -> String {
    let lines = view::screen(app, width, height);
    assert!(lines.len() <= usize::from(height), "{} lines at {width}x{height}", lines.len());
    for line in &lines {
        assert!(line.width() <= usize::from(width), "{width}x{height}: {line}");
    }
    if width == 0 {
        return String::new();
    }
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| frame.render_widget(Text::from(lines), frame.area())).unwrap();
    terminal.backend().to_string()
}

fn has(screen: &str, all: &[&str]) {
    let words = screen.replace('"', " ").split_whitespace().collect::<Vec<_>>().join(" ");
    for one in all {
        assert!(words.contains(one), "no `{one}` in\n{screen}");
    }
}

fn press(app: &mut App, code: KeyCode) -> KeyAction {
    app.press(KeyEvent::new(code, KeyModifiers::NONE))
}

fn two(second: u64) -> Vec<Value> {
    vec![model("digits", json!({})), model("speech", busy(second * 100))]
}

#[test]
fn an_idle_and_a_busy_model_at_the_usual_size() {
    let mut app = app(two, &[gpu(0, true)]);
    let screen = shown(&app, USUAL);
    has(
        &screen,
        &[
            "host ready, 2 models, policy adaptive, every 1 s",
            "MODEL M STATE SHARE SMS BY REQ/S P50 MS P99 MS IN SLO QUEUE REF/S",
            "digits a ready 100% 132 inside idle - - - 0 -",
            "speech b ready 60% 72 inside 110 4.3 18 98.3% 7 10",
            "GPU 0 NVIDIA H200, mps, 132 SMs; 121 of 700 W, busy 37%",
            "SMs ab ab ab ab ab ab ab ab ab a a a a a a a",
            "memory weights 196 MiB, scratch 80 MiB, other 2.1 GiB, free 136.7 of 140.4 GiB",
            "digits (a) on GPU 0: ready for 12 s; SLO 20 ms for 99%; idle",
            "last change: none since the start",
            "worker 4711 (incumbent): serving, 100% (132 SMs), memory 1.2 GiB, weights 98 MiB, scratch 40 MiB",
            "q quits",
        ],
    );
    assert_eq!(press(&mut app, KeyCode::Char('j')), KeyAction::Redraw);
    has(
        &shown(&app, USUAL),
        &[
            "speech (b) on GPU 0: ready for 12 s; SLO 20 ms for 99%, slack -25%",
            "last change: 100% -> 60% (72 SMs), completed; by the policy: 72 SMs instead",
            "plan: the policy wants 60% (keep): it makes room for digits",
            "requests: 7 queued, 4 in flight, 200 done, 0 failed, 20 refused (late 20); mean wait 3 ms",
        ],
    );
    has(&shown(&app, LARGE), &["WAIT MS FAIL/S SLO MS LAST CHANGE", "3.0 0 20 100>60% policy, 12 s ago"]);
    has(&shown(&app, LARGE), &["every 1 s; supervisor 0.1.0, pid 77, up 3 h, with /etc/a.yaml"]);
}

#[test]
fn a_change_that_failed_is_not_taken_for_the_one_in_force() {
    let failed = json!({"handovers": {"aborted": 1, "last": {"outcome": "aborted", "cause": "hand",
        "why": "the new worker\ndid not start"}}});
    let models = |second| {
        let mut speech = model("speech", busy(second * 100));
        merge(&mut speech, failed.clone());
        vec![speech]
    };
    let screen = shown(&app(models, &[gpu(0, true)]), LARGE);
    has(&screen, &["100>60% hand, aborted"]);
    has(&screen, &["aborted; by hand; the new worker did not start; share in force for 12 s"]);
}

#[test]
fn figures_come_from_the_last_sample_once_there_is_one() {
    let mut app = App::new(Duration::from_secs(1));
    has(&shown(&app, USUAL), &["connecting to the supervisor"]);
    let reply = seen(two(1), vec![gpu(0, false)]);
    app.update(Ok(TopReply { samples: Vec::new(), ..reply.clone() }), Duration::from_secs(1));
    has(
        &shown(&app, USUAL),
        &["digits a ready 100% 132 inside idle", "speech b ready 60% 72 inside ... - -"],
    );
    app.update(Ok(reply), Duration::from_secs(2));
    let screen = shown(&app, USUAL);
    has(&screen, &["digits a ready 100% 132 inside idle", "speech b ready 60% 72 inside 110 4.3", "98.3%"]);
}

#[test]
fn an_unready_model_has_its_reason_and_shares_by_percentage_are_a_bar() {
    let slo = json!({"attainment": null, "slack": null});
    let unready =
        json!({"state": "unready", "why": "8 workers in a row did not start", "next_try_s": 4.2, "slo": slo});
    let by_percentage = json!({"groups": null, "mechanism": "shadow", "share_percent": 50});
    let models = |_| vec![model("broken", unready.clone()), model("speech", by_percentage.clone())];
    let mut snapshot = app(models, &[gpu(0, false)]);
    let screen = shown(&snapshot, USUAL);
    has(&screen, &["broken a unready 100% 132 inside - - - - 0 -"]);
    has(&screen, &["broken is unready for 12 s (next try in 4 s): 8 workers in a row did not start"]);
    has(&screen, &["shares bbbbbbbbbbbbbbbbbbbbbbbbb......................... 50%"]);
    let silent = json!({"workers": [{"role": "incumbent", "pid": 1, "share_percent": 50, "sms": 66,
        "phase": "serving", "restarts": 0, "boot_ms": boot(), "memory_mib": null, "memory": null}]});
    snapshot = app(|_| vec![model("speech", silent.clone())], &[gpu(0, false)]);
    has(&shown(&snapshot, USUAL), &["memory unknown"]);
}

#[test]
fn twenty_models_with_long_names_on_several_gpus() {
    let name = |place: u64| format!("a-model-with-a-name-that-is-much-too-long-for-a-table-{place}");
    let models = |second| {
        let of = |place| {
            let mut model = model(&name(place), busy(second * 5_000 * (place + 1)));
            merge(&mut model, json!({"gpu": place % 4}));
            model
        };
        (0..20).map(of).collect()
    };
    let gpus: Vec<Value> = (0..4).map(|index| gpu(index, true)).collect();
    let mut app = app(models, &gpus);
    let screen = shown(&app, USUAL);
    has(&screen, &["models 1-", "of 20", "a-model-with", "GPU 0", "GPU 3", "REF/S", "60%"]);
    has(&screen, &[&format!("{} (a) on GPU 0", name(0)), "last change"]);
    press(&mut app, KeyCode::End);
    has(&shown(&app, USUAL), &["-20 of 20", &format!("{} (t) on GPU 3", name(19))]);
    press(&mut app, KeyCode::Up);
    assert_eq!(app.selected(), 18);
    has(&shown(&app, LARGE), &["GPU 0 NVIDIA H200, mps, 132 SMs", "memory weights"]);
    let page = view::page(&app, 80);
    assert!(page.iter().all(|line| line.width() <= 80));
    let page: String = page.iter().map(|line| format!("{line}\n")).collect();
    has(&page, &[&format!("{} (t) on GPU 3", name(19))]);
}

#[test]
fn an_unreachable_supervisor_is_reported_and_the_last_reply_stays() {
    let mut app = app(two, &[gpu(0, true)]);
    let refused = || Err("cannot reach a supervisor at /run/control.sock".to_owned());
    app.update(refused(), Duration::from_secs(3));
    app.update(refused(), Duration::from_secs(8));
    let gone = "no supervisor for 5 s; retrying every 1 s: cannot reach a supervisor";
    has(&shown(&app, USUAL), &[gone, "speech b ready 60%"]);
    app.update(Ok(seen(two(0), vec![gpu(0, true)])), Duration::from_secs(9));
    let screen = shown(&app, USUAL);
    has(&screen, &["q quits", "speech b ready 60% 72 inside 110"]);
}

#[test]
fn keys_quit_or_select_a_model_that_stays_selected() {
    let mut app = app(two, &[gpu(0, true)]);
    assert_eq!([KeyCode::Char('q'), KeyCode::Esc].map(|key| press(&mut app, key)), [KeyAction::Quit; 2]);
    assert_eq!(app.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), KeyAction::Quit);
    assert_eq!(press(&mut app, KeyCode::Char('c')), KeyAction::Redraw);
    press(&mut app, KeyCode::Down);
    press(&mut app, KeyCode::Down);
    assert_eq!(app.selected(), 1);
    let reordered = vec![model("new", json!({})), model("other", json!({})), model("speech", busy(400))];
    app.update(Ok(seen(reordered, vec![])), Duration::from_secs(3));
    assert_eq!(app.selected(), 2);
    app.update(Ok(seen(vec![], vec![])), Duration::from_secs(4));
    assert_eq!(app.selected(), 0);
    has(&shown(&app, USUAL), &["0 models"]);
}

#[test]
fn no_size_is_too_small() {
    let many =
        |second| (0..30).map(|place| model(&format!("model-{place}"), busy(second * 100 + place))).collect();
    let gpus: Vec<Value> = (0..3).map(|index| gpu(index, index == 1)).collect();
    let mut away = app(two, &gpus);
    away.update(Err("it is gone".to_owned()), Duration::from_secs(3));
    for app in
        [App::new(Duration::from_secs(1)), app(two, &gpus), app(many, &gpus), app(|_| vec![], &[]), away]
    {
        for width in (0..50).chain([79, 80, 81, 119, 200, 500]) {
            for height in (0..12).chain([23, 24, 40, 100]) {
                shown(&app, (width, height));
            }
        }
    }
}
