// A page that is served while training asks for itself again and replaces what changed.
const every = 2000;
async function refresh() {
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (answer.ok) {
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const open = [...document.querySelectorAll("details")].map((part) => part.open);
      const fresh = page.querySelector("main"), old = document.querySelector("main");
      if (fresh && fresh.innerHTML !== old.innerHTML) {
        old.replaceWith(fresh);
        document.title = page.title;
        document.querySelectorAll("details").forEach((part, place) => { part.open = open[place] || false; });
      }
    }
  } catch (error) { /* the server has gone; what is shown stays */ }
  setTimeout(refresh, every);
}
setTimeout(refresh, every);
