use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;

use super::*;
use crate::view::tests::{busy, empty};

const ABOVE: &str = "\
sublet top: 2 tenants, 3 processes
GPU          NAME                                   SUBLET     IN USE      TOTAL
3            NVIDIA H200                          16.5 GiB     20 GiB    140 GiB

TENANT  STATE         ON GPU  OFF GPU     NCCL IMPORTED     HOST   PAUSE  RESUME
infer   paused             -    8 GiB        -        -        -  300 ms  400 ms
train   offloading  16.5 GiB        -  512 MiB   64 MiB    3 GiB       -       -

";
const INFER: &str = "\
infer: 1 process
last pause: prepare 250 ms, release memory 50 ms
last resume: restore contents 400 ms
12 paused python train.py
   GPU 3  torch  kv  8 GiB away";
const TRAIN: &str = "\
train: 2 processes
process 9999999 holds the tenant
1 of 2 processes are held, waiting for process 10
process 11 does: prepare
10 active python train.py
   GPU 3  torch  8 GiB on GPU  64 MiB imported
   GPU 3  nccl  512 MiB on GPU
11 offloading python train.py
   GPU 3  torch  8 GiB on GPU";
const FOOT: &str = "q leave  up/down choose  left/right page  ? help";

fn drawn(screen: &mut Screen, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| screen.draw(frame)).unwrap();
    terminal.backend().buffer().clone()
}

fn lines(buffer: &Buffer) -> Vec<String> {
    let width = usize::from(buffer.area.width);
    let cells: Vec<_> = buffer.content.iter().map(|cell| cell.symbol().to_owned()).collect();
    cells.chunks(width).map(|line| line.concat().trim_end().to_owned()).collect()
}

fn text(screen: &mut Screen) -> String {
    lines(&drawn(screen, 80, 24)).join("\n")
}

fn screen(view: View) -> Screen {
    let mut screen = Screen::new(Style { is_coloured: true });
    screen.show(Ok(view));
    screen
}

#[test]
fn everything_is_on_80_by_24() {
    let mut screen = screen(busy());
    let infer = format!("{ABOVE}{INFER}{}{FOOT}", "\n".repeat(11));
    assert_eq!(text(&mut screen), infer);
    screen.press(Key::Down);
    let train = format!("{ABOVE}{TRAIN}{}{FOOT}", "\n".repeat(7));
    assert_eq!(text(&mut screen), train);
    screen.press(Key::Down);
    assert_eq!(text(&mut screen), train, "the last tenant stays chosen");
    screen.press(Key::Up);
    assert_eq!(text(&mut screen), infer);
}

#[test]
fn long_lists_are_paged_and_end_with_their_last_line() {
    let mut view = busy();
    let member = view.tenants[1].stats.members[0].clone();
    for pid in 100..140 {
        let mut more = member.clone();
        more.member.pid = pid;
        view.tenants[1].stats.members.push(more);
    }
    let mut screen = screen(view);
    screen.press(Key::Down);
    assert!(!text(&mut screen).contains("139 active"));
    for _ in 0..1000 {
        screen.press(Key::Right);
    }
    let end = text(&mut screen);
    assert!(end.contains("139 active") && end.contains("TENANT"), "{end}");
    screen.press(Key::Left);
    assert_ne!(text(&mut screen), end, "a page back shows something else");
}

#[test]
fn a_tenant_that_has_gone_leaves_the_first_chosen() {
    let mut screen = screen(busy());
    screen.press(Key::Down);
    let mut view = busy();
    view.tenants.truncate(1);
    screen.show(Ok(view));
    assert!(text(&mut screen).contains("infer: 1 process"));
}

#[test]
fn help_covers_the_figures_and_goes_away() {
    let mut screen = screen(busy());
    let before = text(&mut screen);
    screen.press(Key::Help);
    let help = text(&mut screen);
    for words in
        ["choose a tenant", "IMPORTED  memory of other processes", "management library tells."]
    {
        assert!(help.contains(words), "{help}");
    }
    screen.press(Key::Help);
    assert_eq!(text(&mut screen), before);
}

#[test]
fn nothing_running_and_trouble_are_said_plainly() {
    assert!(text(&mut screen(empty())).contains("no tenant is running; start one with"));
    let mut fresh = Screen::new(Style { is_coloured: true });
    assert!(text(&mut fresh).contains("looking for tenants"));
    fresh.show(Err("the run directory cannot be read".to_owned()));
    assert!(text(&mut fresh).contains("the run directory cannot be read"));
    fresh.show(Ok(busy()));
    fresh.show(Err("the run directory has gone".to_owned()));
    let shown = text(&mut fresh);
    assert!(shown.contains("2 tenants, 3 processes; the run directory has gone"), "{shown}");
}

#[test]
fn colours_are_used_only_where_they_are_wanted() {
    let colours = |is_coloured| {
        let mut screen = Screen::new(Style { is_coloured });
        screen.show(Ok(busy()));
        let buffer = drawn(&mut screen, 80, 24);
        buffer.content.iter().any(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset)
    };
    assert!(colours(true));
    assert!(!colours(false));
}

#[test]
fn any_size_can_be_drawn() {
    for (width, height) in [(1, 1), (10, 3), (40, 5), (300, 100)] {
        let mut screen = screen(busy());
        screen.press(Key::Help);
        drawn(&mut screen, width, height);
        screen.press(Key::Escape);
        drawn(&mut screen, width, height);
    }
}
