//! The parsers of the control program's replies. They do not assume that the text is as documented.

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ServerStatus {
    Active,
    /// A client's fault broke every context. The server accepts no client until all have exited.
    Fault,
    /// Another status, for example while the server starts or after it has exited.
    Other(String),
}

/// Parses a list of servers or clients: process IDs separated by white space.
pub(super) fn pids(text: &str) -> Option<Vec<i32>> {
    text.split_whitespace().map(|word| word.parse().ok().filter(|pid| *pid > 0)).collect()
}

/// Parses the reply to `get_server_status`. If the control program does not know that command, a
/// listed server counts as active.
pub(super) fn server_status(text: &str) -> ServerStatus {
    let text = text.trim();
    if !knows(text) {
        return ServerStatus::Active;
    }
    match text.to_ascii_uppercase().as_str() {
        "ACTIVE" => ServerStatus::Active,
        "FAULT" => ServerStatus::Fault,
        _ => ServerStatus::Other(text.to_owned()),
    }
}

/// Returns true if the reply to `terminate_client` means that the GPU runs no work of the client.
/// The reply is a message in case of an error, for example for an unknown client, and then a
/// number, which is 0 for success.
pub(super) fn is_terminated(text: &str) -> bool {
    text.contains("Invalid process") || text.trim().lines().last() == Some("0")
}

/// Returns true if the program knows the command.
pub(super) fn knows(text: &str) -> bool {
    !text.contains("Unknown command")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processes() {
        assert_eq!(pids("507\n"), Some(vec![507]));
        assert_eq!(pids("508 509\n510\n"), Some(vec![508, 509, 510]));
        assert_eq!(pids(""), Some(Vec::new()));
        for text in
            ["Server 507 not found\n", "Cannot find MPS control daemon process", "-1", "0", "99999999999"]
        {
            assert_eq!(pids(text), None, "{text}");
        }
    }

    #[test]
    fn states_of_a_server() {
        assert_eq!(server_status("ACTIVE\n"), ServerStatus::Active);
        assert_eq!(server_status("Unknown command \"get_server_status\""), ServerStatus::Active);
        assert_eq!(server_status("FAULT\n"), ServerStatus::Fault);
        for other in ["Initializing", "Server 12345 not found", "INACTIVE", ""] {
            assert_eq!(server_status(&format!("{other}\n")), ServerStatus::Other(other.to_owned()));
        }
    }

    #[test]
    fn what_became_of_a_termination() {
        assert!(is_terminated("0\n") && is_terminated("Invalid process 99999!\n1\n"));
        assert!(!is_terminated("1\n") && !is_terminated(""));
    }

    #[test]
    fn unknown_commands() {
        assert!(!knows("Unknown command \"lspart\"\n"));
        assert!(knows("GPU GpuBackend free_chunks\n"));
    }
}
