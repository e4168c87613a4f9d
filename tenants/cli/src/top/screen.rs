//! What is drawn, and what keys do to it.

use std::iter;
use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style as Look};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Clear, Paragraph, Row, Table, TableState};
use tenants::wire::{MemberState, MemberStats, Phase, PhaseReport};

use super::keys::Key;
use super::waiting;
use crate::gpus::Held;
use crate::outsiders::command_of;
use crate::view::{Left, TenantView, View};
use crate::{ps, units};

/// Figures older than this are said to be old.
const LATE: Duration = Duration::from_secs(3);
/// Lines of GPUs and of tenants that are shown at most, titles not counted; what does not fit is counted.
const GPUS_MAX: usize = 8;
const TENANTS_MAX: u16 = 8;

const HELP: [&str; 13] = [
    "q, Ctrl-C      leave",
    "up, down       choose a tenant; its processes are below",
    "left, right    page through them",
    "?              this help, and away with it",
    "",
    "ON GPU    own memory that is on the GPU",
    "OFF GPU   own memory that a pause has given up",
    "NCCL      of ON GPU, what NCCL has of its own",
    "IMPORTED  memory of other processes, which count it as their own",
    "HOST      host memory and disk that hold saved contents",
    "PAUSE, RESUME  how long the last one took, all phases together",
    "In the line of a GPU: what tenants have there, what is in use by all,",
    "and all of it, where NVIDIA's management library tells.",
];

/// How it looks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    pub(super) is_coloured: bool,
}

const TITLE: Look = Look::new().add_modifier(Modifier::BOLD);
const CHOSEN: Look = Look::new().add_modifier(Modifier::REVERSED);

impl Style {
    fn coloured(self, color: Color) -> Look {
        if self.is_coloured { Look::default().fg(color) } else { Look::default() }
    }

    fn state(self, state: &str) -> Look {
        match state {
            "active" => self.coloured(Color::Green),
            "paused" | "deep" => self.coloured(Color::Blue),
            "FAULTED" => self.coloured(Color::Red).add_modifier(Modifier::BOLD),
            _ => self.coloured(Color::Yellow),
        }
    }
}

/// The whole screen.
#[derive(Debug)]
pub(super) struct Screen {
    style: Style,
    view: Option<View>,
    /// Why the last look failed.
    trouble: Option<String>,
    seen: Instant,
    /// Name of the chosen tenant: tenants come and go.
    chosen: Option<String>,
    /// First line of its processes that is shown.
    scroll: usize,
    shows_help: bool,
}

impl Screen {
    pub(super) fn new(style: Style) -> Self {
        Self {
            style,
            view: None,
            trouble: None,
            seen: Instant::now(),
            chosen: None,
            scroll: 0,
            shows_help: false,
        }
    }

    /// Takes a look in.
    pub(super) fn show(&mut self, look: Result<View, String>) {
        match look {
            Ok(mut view) => {
                if let Some(last) = &self.view {
                    remember(last, &mut view);
                }
                self.view = Some(view);
                self.trouble = None;
            }
            Err(trouble) => self.trouble = Some(trouble),
        }
        self.seen = Instant::now();
    }

    /// Have the figures become old?
    pub(super) fn is_late(&self) -> bool {
        self.seen.elapsed() > LATE
    }

    pub(super) fn press(&mut self, key: Key) {
        match key {
            Key::Help => self.shows_help = !self.shows_help,
            Key::Escape => self.shows_help = false,
            Key::Up => self.choose(|index, _| index.saturating_sub(1)),
            Key::Down => self.choose(|index, last| (index + 1).min(last)),
            Key::Left => self.scroll = self.scroll.saturating_sub(1),
            Key::Right => self.scroll += 1,
            // Nothing is to be seen of it.
            Key::Leave => {}
        }
    }

    fn tenants(&self) -> &[TenantView] {
        self.view.as_ref().map_or(&[], |view| &view.tenants)
    }

    /// The chosen one, or the first where that has gone.
    fn index(&self) -> usize {
        let is_chosen = |tenant: &TenantView| Some(&tenant.stats.tenant) == self.chosen.as_ref();
        self.tenants().iter().position(is_chosen).unwrap_or(0)
    }

    fn choose(&mut self, step: impl Fn(usize, usize) -> usize) {
        let index = step(self.index(), self.tenants().len().saturating_sub(1));
        self.chosen = self.tenants().get(index).map(|tenant| tenant.stats.tenant.clone());
        self.scroll = 0;
    }

    pub(super) fn draw(&mut self, frame: &mut Frame<'_>) {
        let foot = Constraint::Length(1);
        let [head, body, foot] =
            Layout::vertical([Constraint::Length(1), Constraint::Min(0), foot]).areas(frame.area());
        frame.render_widget(Line::from(self.head()).style(TITLE), head);
        frame.render_widget("q leave  up/down choose  left/right page  ? help", foot);
        let Some(view) = &self.view else {
            let said = self.trouble.as_deref().unwrap_or("looking for tenants ...");
            frame.render_widget(Paragraph::new(said), body);
            return;
        };
        if view.tenants.is_empty() && view.gpus.is_empty() {
            frame.render_widget(Paragraph::new(nobody()), body);
        } else {
            let gpus = gpu_lines(view);
            let gpu_lines = u16::try_from(gpus.len()).unwrap_or(u16::MAX);
            let tenants =
                u16::try_from(view.tenants.len()).unwrap_or(u16::MAX).clamp(1, TENANTS_MAX);
            let [top, middle, bottom] = Layout::vertical([
                Constraint::Length(gpu_lines + 2),
                Constraint::Length(tenants + 2),
                Constraint::Min(0),
            ])
            .areas(body);
            Self::draw_gpus(frame, top, gpus);
            self.draw_tenants(frame, middle, view);
            self.scroll = self.draw_chosen(frame, bottom, view);
        }
        if self.shows_help {
            let shown = Rect { height: body.height.min(15), ..body };
            frame.render_widget(Clear, shown);
            let lines: Vec<_> = HELP.iter().map(|line| Line::from(*line)).collect();
            frame.render_widget(Paragraph::new(lines), shown);
        }
    }

    fn head(&self) -> String {
        let count = |count: usize, one: &str, more: &str| {
            format!("{count} {}", if count == 1 { one } else { more })
        };
        let processes = self.tenants().iter().map(|tenant| tenant.stats.members.len()).sum();
        let text = format!(
            "sublet top: {}, {}",
            count(self.tenants().len(), "tenant", "tenants"),
            count(processes, "process", "processes")
        );
        let late =
            self.is_late().then(|| format!("as it was {} s ago", self.seen.elapsed().as_secs()));
        let more = late.into_iter().chain(self.trouble.clone());
        iter::once(text).chain(more).collect::<Vec<_>>().join("; ")
    }

    fn draw_gpus(frame: &mut Frame<'_>, area: Rect, rows: Vec<[String; 5]>) {
        let header = ["GPU", "NAME", "SUBLET", "IN USE", "TOTAL"];
        let widths = [
            Constraint::Length(12),
            Constraint::Min(20),
            Constraint::Length(10),
            Constraint::Length(10),
            Constraint::Length(10),
        ];
        let rows = rows.into_iter().map(|row| Row::new(figures(row, 2)));
        let header = Row::new(figures(header.map(str::to_owned), 2)).style(TITLE);
        frame.render_widget(Table::new(rows, widths).header(header), area);
    }

    fn draw_tenants(&self, frame: &mut Frame<'_>, area: Rect, view: &View) {
        if view.tenants.is_empty() {
            frame.render_widget(Paragraph::new(nobody()), area);
            return;
        }
        let header =
            ["TENANT", "STATE", "ON GPU", "OFF GPU", "NCCL", "IMPORTED", "HOST", "PAUSE", "RESUME"];
        let widths = [
            Constraint::Min(8),
            Constraint::Length(11),
            Constraint::Length(9),
            Constraint::Length(9),
            Constraint::Length(9),
            Constraint::Length(9),
            Constraint::Length(9),
            Constraint::Length(8),
            Constraint::Length(8),
        ];
        let rows = view.tenants.iter().map(|tenant| {
            let cells = tenant_row(tenant);
            let look = self.style.state(&cells[1]);
            Row::new(figures(cells, 2)).style(look)
        });
        let header = Row::new(figures(header.map(str::to_owned), 2)).style(TITLE);
        let table =
            Table::new(rows, widths).header(header).column_spacing(0).row_highlight_style(CHOSEN);
        let mut state = TableState::new().with_selected(self.index());
        frame.render_stateful_widget(table, area, &mut state);
    }

    /// Returns the first line that is shown: there is nothing behind the last.
    fn draw_chosen(&self, frame: &mut Frame<'_>, area: Rect, view: &View) -> usize {
        let Some(tenant) = view.tenants.get(self.index()) else { return 0 };
        let count = tenant.stats.members.len();
        let word = if count == 1 { "process" } else { "processes" };
        let mut lines =
            vec![Line::styled(format!("{}: {count} {word}", tenant.stats.tenant), TITLE)];
        for said in waiting::sentences(tenant, command_of) {
            lines.push(Line::from(Span::styled(said, self.style.coloured(Color::Yellow))));
        }
        let members = &tenant.stats.members;
        for (name, phases) in [
            ("pause", slowest(members, |member| &member.last_pause)),
            ("resume", slowest(members, |member| &member.last_resume)),
        ] {
            if !phases.is_empty() {
                let each = phases.iter().map(|(phase, elapsed_us)| {
                    format!("{} {}", phase.label(), units::micros(*elapsed_us))
                });
                let each: Vec<_> = each.collect();
                lines.push(Line::from(format!("last {name}: {}", each.join(", "))));
            }
        }
        lines.extend(members.iter().flat_map(|member| {
            let left = tenant.left_by(member.member.pid).map(Left::bytes);
            self.process_lines(view, member, left)
        }));
        lines.extend(tenant.silent.iter().map(|silent| {
            let state = Span::styled(silent.standing.label(), self.style.coloured(Color::Yellow));
            let held = silent.gpus.iter().map(|held| {
                let (bytes, gpu) = (units::bytes(held.bytes), view.gpu_label(&held.uuid));
                format!(", had {bytes} on GPU {gpu}")
            });
            let (pid, command) = (format!("{} ", silent.pid), format!(" {}", silent.command));
            let held = Span::raw(held.collect::<String>());
            Line::from(vec![Span::raw(pid), state, held, Span::raw(command)])
        }));
        let last = lines.len().saturating_sub(usize::from(area.height));
        let first = self.scroll.min(last);
        lines.drain(..first);
        frame.render_widget(Paragraph::new(lines), area);
        first
    }

    /// A process, and its memory by GPU, library and tag.
    fn process_lines(
        &self,
        view: &View,
        member: &MemberStats,
        left_bytes: Option<u64>,
    ) -> Vec<Line<'static>> {
        let info = &member.member;
        let state = ps::state_label(info.state);
        let left = left_bytes.map(|bytes| format!(", {}", ps::left_label(bytes)));
        let mut lines = vec![Line::from(vec![
            Span::raw(format!("{} ", info.pid)),
            Span::styled(state, self.style.state(state)),
            Span::raw(left.unwrap_or_default()),
            Span::raw(format!(" {}", info.command)),
        ])];
        for device in &member.pool.devices {
            for class in &device.classes {
                let away_bytes = class.own_bytes.saturating_sub(class.resident_bytes);
                let mut parts = vec![class.library.clone()];
                if !class.tag.is_empty() && class.tag != class.library {
                    parts.push(class.tag.clone());
                }
                for (bytes, what) in [
                    (class.resident_bytes, "on GPU"),
                    (away_bytes, "away"),
                    (class.imported_bytes, "imported"),
                ] {
                    if bytes > 0 {
                        parts.push(format!("{} {what}", units::bytes(bytes)));
                    }
                }
                let label = view.gpu_label(&device.uuid);
                lines.push(Line::from(format!("   GPU {label}  {}", parts.join("  "))));
            }
        }
        lines
    }
}

/// What processes that do not answer now had on GPUs when they last did.
fn remember(last: &View, view: &mut View) {
    let members = || last.tenants.iter().flat_map(|tenant| &tenant.stats.members);
    let silent = || last.tenants.iter().flat_map(|tenant| &tenant.silent);
    for now in view.tenants.iter_mut().flat_map(|tenant| &mut tenant.silent) {
        let before = members().find(|member| member.member.pid == now.pid);
        now.gpus = if let Some(member) = before {
            let devices = member.pool.devices.iter();
            let held = devices
                .map(|device| Held { uuid: device.uuid.clone(), bytes: device.resident_bytes() });
            held.filter(|held| held.bytes > 0).collect()
        } else {
            let before = silent().find(|silent| silent.pid == now.pid);
            before.map_or_else(Vec::new, |silent| silent.gpus.clone())
        };
    }
}

fn nobody() -> &'static str {
    "no tenant is running; start one with: sublet run --tenant NAME -- COMMAND ARGUMENTS"
}

/// Cells of which those from `first` on hold figures, which end below each other.
fn figures<const N: usize>(cells: [String; N], first: usize) -> Vec<Line<'static>> {
    let line = |(index, cell)| {
        let line = Line::from(cell);
        if index >= first { line.right_aligned() } else { line }
    };
    cells.into_iter().enumerate().map(line).collect()
}

fn gpu_lines(view: &View) -> Vec<[String; 5]> {
    let line = |gpu: &crate::gpus::Gpu| {
        let members = view.tenants.iter().flat_map(|tenant| &tenant.stats.members);
        let devices = members.flat_map(|member| &member.pool.devices);
        let here = devices.filter(|device| device.uuid == gpu.uuid);
        let bytes = here.map(vmm_pool::DeviceReport::resident_bytes).sum();
        let known = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), units::bytes);
        let name = gpu.name.clone().unwrap_or_else(|| "-".to_owned());
        [gpu.label(), name, units::bytes(bytes), known(gpu.used_bytes), known(gpu.total_bytes)]
    };
    let mut lines: Vec<_> = view.gpus.iter().take(GPUS_MAX).map(line).collect();
    if let Some(more) = view.gpus.len().checked_sub(GPUS_MAX).filter(|more| *more > 0) {
        let [_, rest @ ..] = [const { String::new() }; 5];
        let [name, a, b, c] = rest;
        lines.push([format!("{more} more"), name, a, b, c]);
    }
    lines
}

fn tenant_row(tenant: &TenantView) -> [String; 9] {
    let members = &tenant.stats.members;
    let devices = || members.iter().flat_map(|member| &member.pool.devices);
    let classes = || devices().flat_map(|device| &device.classes);
    let own: u64 = classes().map(|class| class.own_bytes).sum();
    let resident: u64 = classes().map(|class| class.resident_bytes).sum();
    let is_nccl = |class: &&vmm_pool::ClassBytes| class.tag == "nccl";
    let nccl = classes().filter(is_nccl).map(|class| class.resident_bytes).sum();
    let imported = classes().map(|class| class.imported_bytes).sum();
    let pools = members.iter().map(|member| &member.pool);
    let host = pools.map(|pool| pool.host_arena_bytes + pool.file_bytes).sum();
    let took = |phases: Vec<(Phase, u64)>| {
        let all: u64 = phases.iter().map(|(_, elapsed_us)| elapsed_us).sum();
        if all == 0 { "-".to_owned() } else { units::micros(all) }
    };
    [
        tenant.stats.tenant.clone(),
        if members.is_empty() && !tenant.silent.is_empty() {
            "no answer".to_owned()
        } else {
            state_of(members).to_owned()
        },
        units::bytes_or_dash(resident),
        units::bytes_or_dash(own.saturating_sub(resident)),
        units::bytes_or_dash(nccl),
        units::bytes_or_dash(imported),
        units::bytes_or_dash(host),
        took(slowest(members, |member| &member.last_pause)),
        took(slowest(members, |member| &member.last_resume)),
    ]
}

/// The state of all, or the one that says most about what is going on.
fn state_of(members: &[MemberStats]) -> &'static str {
    let by_weight = [
        MemberState::Faulted,
        MemberState::Offloading,
        MemberState::Restoring,
        MemberState::Active,
        MemberState::Paused,
        MemberState::Deep,
    ];
    let is_there = |state: &MemberState| members.iter().any(|member| member.member.state == *state);
    by_weight.into_iter().find(is_there).map_or("-", ps::state_label)
}

/// The phases of a change, each with the time of the process that took longest.
fn slowest(
    members: &[MemberStats],
    of: impl Fn(&MemberStats) -> &Vec<(Phase, PhaseReport)>,
) -> Vec<(Phase, u64)> {
    let mut phases: Vec<(Phase, u64)> = Vec::new();
    for (phase, report) in members.iter().flat_map(of) {
        match phases.iter_mut().find(|(known, _)| known == phase) {
            Some((_, longest_us)) => *longest_us = report.elapsed_us.max(*longest_us),
            None => phases.push((*phase, report.elapsed_us)),
        }
    }
    phases
}

#[cfg(test)]
mod tests;
