//! What a Markdown page offers to others, and what it asks of them: headings, links, words in code type.

use std::collections::BTreeSet;

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

/// A page, as far as checks ask about it.
#[derive(Debug, Default)]
pub(crate) struct Page {
    /// What `#...` may name: its headings as the book and code hosts spell them, and ids in HTML.
    pub(crate) anchors: BTreeSet<String>,
    /// Links and pictures that stay in the project, in order.
    pub(crate) links: Vec<Link>,
    /// The texts of its code spans.
    pub(crate) code: BTreeSet<String>,
    /// The lines of rows of tables that are shown as text: they have no head, or a blank line parts them from it.
    pub(crate) stray_rows: Vec<usize>,
}

/// A link of a page.
#[derive(Debug)]
pub(crate) struct Link {
    /// Its line, counted from 1.
    pub(crate) line: usize,
    /// Where it leads, as written.
    pub(crate) target: String,
}

impl Page {
    /// Reads the page `text`.
    pub(crate) fn read(text: &str) -> Self {
        let mut page = Self::default();
        let mut heading: Option<String> = None;
        let options = Options::ENABLE_TABLES | Options::ENABLE_STRIKETHROUGH;
        for (event, range) in Parser::new_ext(text, options).into_offset_iter() {
            let line = || text.bytes().take(range.start).filter(|byte| *byte == b'\n').count() + 1;
            if let Event::Text(words) | Event::Code(words) = &event
                && let Some(heading) = &mut heading
            {
                heading.push_str(words);
            }
            if let Event::Start(Tag::Heading { .. }) = event {
                heading = Some(String::new());
            } else if let Event::Start(Tag::Paragraph) = event {
                page.stray_rows.extend(text[range.clone()].starts_with('|').then(line));
            } else if let Event::End(TagEnd::Heading(_)) = event {
                page.add_anchor(&heading.take().unwrap_or_default());
            } else if let Event::Code(words) = event {
                page.code.insert(words.into_string());
            } else if let Event::Html(html) | Event::InlineHtml(html) = event {
                page.anchors.extend(attributes(&html, "id"));
                let targets = ["href", "src"].iter().flat_map(|name| attributes(&html, name));
                page.add_links(targets, line());
            } else if let Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) =
                event
            {
                page.add_links([dest_url.into_string()], line());
            }
        }
        page
    }

    /// Those that stay in the project.
    fn add_links(&mut self, targets: impl IntoIterator<Item = String>, line: usize) {
        let ours = targets.into_iter().filter(|target| is_ours(target));
        self.links.extend(ours.map(|target| Link { line, target }));
    }

    /// A heading's name; of equal ones the later have a number behind.
    fn add_anchor(&mut self, heading: &str) {
        let name: String = heading
            .trim()
            .to_lowercase()
            .chars()
            .filter(|letter| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_'))
            .map(|letter| if letter == ' ' { '-' } else { letter })
            .collect();
        let numbered = (1..).map(|number| format!("{name}-{number}"));
        let free = std::iter::once(name.clone()).chain(numbered);
        for candidate in free {
            if self.anchors.insert(candidate) {
                return;
            }
        }
    }
}

/// Does a link stay in the project? Others are not looked at: checks use no network.
fn is_ours(target: &str) -> bool {
    let (scheme, rest) = target.split_once(':').unwrap_or(("", target));
    let has_scheme =
        !scheme.is_empty() && scheme.chars().all(|letter| letter.is_ascii_alphanumeric());
    !has_scheme && !rest.starts_with("//")
}

/// The values of the attribute `name` in `html`.
pub(crate) fn attributes(html: &str, name: &str) -> Vec<String> {
    let mark = format!(" {name}=\"");
    let flat = html.replace(['\n', '\t'], " ");
    flat.split(&mark).skip(1).filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())).collect()
}

/// The file that the link `file` of the page at `from` names, relative to the repository; the page itself for an empty one.
/// None outside of the repository.
pub(crate) fn resolve(from: &str, file: &str) -> Option<String> {
    if file.is_empty() {
        return Some(from.to_owned());
    }
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in file.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_are_named_as_the_book_names_them() {
        let page = Page::read(
            "# `cuMemMap`, and why\n\n## Same\n\n## Same\n\ntext\n\n<a id=\"own\"></a>\n",
        );
        let names: Vec<_> = page.anchors.iter().map(String::as_str).collect();
        assert_eq!(names, ["cumemmap-and-why", "own", "same", "same-1"]);
    }

    #[test]
    fn links_of_all_kinds_are_found_but_not_in_code() {
        let text = "[a](a.md) ![b](b.svg) [c][c]\n\n<img src=\"d.svg\">\n\n[c]: c.md\n\n`[no](no.md)`\n\n```\n[no](no.md)\n```\n\n[e](https://e)\n";
        let page = Page::read(text);
        let found: Vec<_> =
            page.links.iter().map(|link| (link.line, link.target.as_str())).collect();
        assert_eq!(found, [(1, "a.md"), (1, "b.svg"), (1, "c.md"), (3, "d.svg")]);
        assert!(page.code.contains("[no](no.md)"));
    }

    #[test]
    fn rows_without_their_table_are_found() {
        let page = Page::read("| a |\n| --- |\n| b |\n\n| c |\n");
        assert_eq!(page.stray_rows, [5]);
    }

    #[test]
    fn paths_are_resolved_from_the_page() {
        let cases = [
            ("docs/a.md", "b.md", Some("docs/b.md")),
            ("docs/a.md", "../x/y", Some("x/y")),
            ("docs/a.md", "", Some("docs/a.md")),
            ("a.md", "./docs/", Some("docs")),
            ("a.md", "../b", None),
        ];
        for (from, file, whole) in cases {
            assert_eq!(resolve(from, file).as_deref(), whole, "{file}");
        }
    }
}
