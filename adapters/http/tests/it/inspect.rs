//! Looking at a callback: what is found, and that nothing is delivered.

use std::sync::{Arc, Mutex};

use inboxd_contract::{Finding, Severity};
use inboxd_http::{HttpConfig, HttpForwarder};
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;

use crate::support::{Connection, OK, Raw, config};

async fn head(connection: &mut Connection) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(connection.stream.read_u8().await.ok()?);
    }
    Some(String::from_utf8_lossy(&head).into_owned())
}

async fn only_finding(config: HttpConfig) -> Finding {
    let mut findings = HttpForwarder::new(config).unwrap().inspect().await;
    assert_eq!(findings.len(), 1, "{findings:?}");
    findings.remove(0)
}

#[tokio::test]
async fn a_callback_is_asked_for_its_options_and_gets_no_message() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let heads = seen.clone();
    let raw = Raw::start(move |mut connection| {
        let heads = heads.clone();
        async move {
            while let Some(head) = head(&mut connection).await {
                heads.lock().unwrap().push(head);
                connection.write(OK).await;
            }
        }
    })
    .await;
    let mut config = config(raw.url());
    config.fixed_headers.push(("X-Key".into(), "geheim".into()));
    let finding = only_finding(config).await;
    assert_eq!(finding.severity, Severity::Info, "{finding:?}");
    assert!(!format!("{finding:?}").contains("geheim"), "{finding:?}");
    let seen = seen.lock().unwrap();
    assert_eq!(seen.len(), 1, "{seen:?}");
    assert!(seen[0].starts_with("OPTIONS /orders ") && seen[0].contains("geheim"), "{seen:?}");
}

#[tokio::test]
async fn nobody_there_is_a_problem_and_so_is_another_protocol() {
    let port = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", port.local_addr().unwrap());
    drop(port);
    let finding = only_finding(config(url)).await;
    assert_eq!(finding.severity, Severity::Problem, "{finding:?}");

    let other = Raw::start(|mut connection| async move {
        head(&mut connection).await;
        connection.write(b"SSH-2.0-nothing\r\n").await;
    })
    .await;
    let finding = only_finding(config(other.url())).await;
    assert_eq!(finding.severity, Severity::Problem, "{finding:?}");
    assert!(finding.remedy.contains("http or https"), "{finding:?}");
}
