//! The only module that writes to standard output. Control characters in text of others are replaced here, once. A reader that
//! has ended (`sublet ps | head -1`) is no error.

use std::io::{self, ErrorKind, Write as _};

use comfy_table::{CellAlignment, ContentArrangement, Row, Table, presets};
use serde::Serialize;
use tenants::error_text::plain;

use crate::failure::{EXIT_PARTIAL, EXIT_UNCHANGED, Failure};
use crate::units;

/// The version of documents. It changes when programs for the version before would misread them (`docs/json.md`).
pub(crate) const JSON_VERSION: u32 = 1;

/// A document as it is printed.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub(crate) struct Versioned<T> {
    /// 1. It changes when a program that reads documents of the version before would misread them.
    version: u32,
    #[serde(flatten)]
    fields: T,
}

/// Lines to be printed, written together at the end.
#[derive(Debug, Default)]
pub(crate) struct Output {
    text: String,
    /// The columns of the terminal, if the output goes to one.
    columns: Option<usize>,
}

impl Output {
    pub(crate) fn new() -> Self {
        Self { text: String::new(), columns: Table::new().width().map(usize::from) }
    }

    pub(crate) fn line(&mut self, line: impl AsRef<str>) {
        self.text.push_str(&plain(line.as_ref()));
        self.text.push('\n');
    }

    pub(crate) fn lines(&mut self, lines: impl IntoIterator<Item = String>) {
        lines.into_iter().for_each(|line| self.line(line));
    }

    /// Adds whole lines of text. The text is from this program, or has no control characters.
    pub(crate) fn text_block(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Adds a table. Its lines are cut to the width of a terminal, so the longest column is the last.
    pub(crate) fn table(&mut self, table: &Table) {
        let mut table = table.clone();
        for row in table.row_iter_mut() {
            *row = Row::from(row.cell_iter().map(|cell| plain(&cell.content())));
        }
        for line in table.lines() {
            let columns = self.columns.unwrap_or(usize::MAX);
            self.line(units::shortened(line.trim_end(), columns));
        }
    }

    /// Adds a document for programs, indented, with [`JSON_VERSION`] as its first field. `fields` is a struct.
    pub(crate) fn json(&mut self, fields: &impl Serialize) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(&Versioned { version: JSON_VERSION, fields })
            .map_err(|error| Failure::of(&error, EXIT_UNCHANGED))?;
        self.lines(text.lines().map(str::to_owned));
        Ok(())
    }

    /// Writes all lines of a command that changes nothing.
    pub(crate) fn finish(self) -> Result<(), Failure> {
        self.finish_after(false)
    }

    /// Writes all lines of a command that changes something. If it `is_done`, the change is complete, also if the output cannot
    /// be written.
    pub(crate) fn finish_after(self, is_done: bool) -> Result<(), Failure> {
        let mut stdout = io::stdout().lock();
        let written = stdout.write_all(self.text.as_bytes()).and_then(|()| stdout.flush());
        match written {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                let (exit, done) = if is_done {
                    (EXIT_PARTIAL, "; the command was carried out: `sublet ps` shows the result")
                } else {
                    (EXIT_UNCHANGED, "")
                };
                Err(Failure::new(
                    format!("standard output could not be written: {error}{done}"),
                    exit,
                ))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    pub(crate) fn into_lines(self) -> Vec<String> {
        self.text.lines().map(str::to_owned).collect()
    }

    #[cfg(test)]
    pub(crate) fn text(&self) -> &str {
        &self.text
    }
}

/// Writes a message to standard error. A failure of that could not be reported anywhere, so it is not checked.
pub(crate) fn complain(message: &str) {
    writeln!(io::stderr().lock(), "sublet: {}", plain(message)).ok();
}

/// A plain table: no lines, two blanks between columns, as wide as its content; columns whose index is
/// in `right` hold figures.
pub(crate) fn table(header: &[&str], right: &[usize]) -> Table {
    let mut table = Table::new();
    table.set_header(header.iter().copied());
    lay_out(&mut table);
    for index in right {
        if let Some(column) = table.column_mut(*index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// As [`table`], for rows that need no titles.
pub(crate) fn table_without_header<const N: usize>(
    rows: impl IntoIterator<Item = [String; N]>,
) -> Table {
    let mut table = Table::new();
    for row in rows {
        table.add_row(row.map(|cell| plain(&cell)));
    }
    lay_out(&mut table);
    table
}

fn lay_out(table: &mut Table) {
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .force_no_tty();
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVIL: &str = "kv\u{1b}[2J\u{202e}\nspoof  active";

    #[derive(Serialize)]
    struct Fields {
        tag: &'static str,
    }

    #[test]
    fn what_others_wrote_is_plain_in_lines_and_cells_and_whole_in_documents() {
        let mut output = Output::default();
        output.line(EVIL);
        let mut cells = table(&["TAG"], &[]);
        cells.add_row([EVIL]);
        output.table(&cells);
        output.lines(table_without_header([[EVIL.to_owned()]]).lines());
        let shown = "kv\\u001b[2J\\u202e\\u000aspoof  active";
        let lines: Vec<_> = output.text().lines().map(str::trim_end).collect();
        assert_eq!(lines, [shown, "TAG", shown, shown]);

        let mut output = Output::default();
        output.json(&Fields { tag: EVIL }).unwrap();
        assert!(output.text().chars().all(|c| c == '\n' || c.is_ascii_graphic() || c == ' '));
        let document: serde_json::Value = serde_json::from_str(output.text()).unwrap();
        assert_eq!(document["tag"], EVIL);
    }
}
